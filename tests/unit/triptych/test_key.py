"""`triptych key` and the key file fit together."""

import json

from services.gateway.tenancy.tenants import Keyring
from triptych.key import make_key


def test_a_made_key_opens_what_its_entry_says(tmp_path):
    first, second = make_key("search").splitlines()
    key, entry = first.split(": ")[1], json.loads(second.split(": ", 1)[1])
    (tmp_path / "keys").write_text(json.dumps({"keys": [entry]}))
    identity = Keyring((), tmp_path / "keys").identify(f"Bearer {key}".encode())
    assert identity is not None and identity.tenant.name == "search"
