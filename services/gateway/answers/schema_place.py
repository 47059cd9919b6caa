"""The place of a JSON schema in a request, which errors about the schema name."""

from dataclasses import dataclass
from typing import NoReturn

from services.common.errors import InvalidGrammar


@dataclass(frozen=True, slots=True)
class SchemaPlace:
    """The place of a function's or an answer's schema.

    Attributes:
        param: field of the request that holds the schema.
        function: name of the function. Empty for the schema of an answer.
        strict: true if the client was promised that every keyword is enforced.
    """

    param: str = ""
    function: str = ""
    strict: bool = True

    def refuse(self, path: str, what: str) -> None:
        """Refuses a keyword that cannot be enforced. Does nothing if the place is not strict.

        The caller then leaves the keyword out.

        Args:
            path: path from the schema to the keyword, such as `.properties.city.pattern`.
            what: noun phrase that names the keyword in the error.

        Raises:
            InvalidGrammar: the place is strict.
        """
        if self.strict:
            beside = " with strict" if self.function else ""
            self.reject(path, f"{what} is not supported{beside}")

    def reject(self, path: str, message: str) -> NoReturn:
        """Refuses the request because of the keyword at a path, also if the place is not strict.

        Raises:
            InvalidGrammar: always.
        """
        function = f"in function {self.function}, " if self.function else ""
        raise InvalidGrammar(f"{function}{message}", param=f"{self.param}{path}")
