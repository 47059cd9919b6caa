"""Look-ups of host names: one that gets no answer delays no other."""

import asyncio
import threading

from services.gateway.media.web_media import SystemResolver
from services.gateway.tenancy.tenants import Identity, Limits, Tenant, bind_identity
from tests.noise import PATIENCE_S, turns


async def test_names_without_an_answer_delay_no_other_look_up():
    release, asked = threading.Event(), []

    class Silent(SystemResolver):
        def look_up(self, host, port):
            asked.append(host)
            if host.startswith("silent"):
                release.wait(PATIENCE_S)
            return ["93.184.216.34"]

    resolver = Silent(timeout_s=0.5)
    silent = [resolver.resolve(f"silent{n % 20}", 80) for n in range(100)]
    failed = asyncio.gather(*silent, return_exceptions=True)
    await turns()  # they wait
    resolver._timeout_s = PATIENCE_S
    assert await resolver.resolve("quick", 80) == ["93.184.216.34"]
    assert {type(one) for one in await failed} == {TimeoutError}
    assert len(asked) == 21  # equal names share a look-up
    release.set()
    while resolver.num_lookups:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    resolver.close()


async def test_a_tenant_of_silent_names_leaves_threads_to_others():
    """A look-up keeps its thread after its caller has left."""
    release = threading.Event()

    class Silent(SystemResolver):
        def look_up(self, host, port):
            if host.startswith("silent"):
                release.wait(PATIENCE_S)
            return ["93.184.216.34"]

    resolver = Silent(timeout_s=0.5)

    async def ask(tenant, host):
        bind_identity(Identity(Tenant(tenant, Limits(), shares_caches=False)))
        return await resolver.resolve(host, 80)

    failed: list[BaseException] = []
    for turn in range(10):
        hosts = [f"silent{turn}-{n}" for n in range(16)]
        failed += await asyncio.gather(*(ask("a", h) for h in hosts), return_exceptions=True)
    assert sum(isinstance(one, TimeoutError) for one in failed) == 16
    resolver._timeout_s = PATIENCE_S
    assert await ask("b", "quick") == ["93.184.216.34"]
    release.set()
    while resolver.num_lookups:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert await ask("a", "quick") == ["93.184.216.34"]
    assert await ask("a", "quicker") == ["93.184.216.34"]
    resolver.close()


async def test_a_batch_of_silent_names_leaves_look_ups_to_its_tenants_requests():
    release = threading.Event()

    class Silent(SystemResolver):
        def look_up(self, host, port):
            if host.startswith("silent"):
                release.wait(PATIENCE_S)
            return ["93.184.216.34"]

    resolver = Silent()

    async def ask(host, is_background):
        tenant = Tenant("a", Limits(), shares_caches=False, is_background=is_background)
        bind_identity(Identity(tenant))
        return await resolver.resolve(host, 80)

    lines = [asyncio.create_task(ask(f"silent{n}", True)) for n in range(20)]
    await turns()
    assert resolver.num_lookups == 16
    assert await asyncio.create_task(ask("quick", False)) == ["93.184.216.34"]
    release.set()
    found = await asyncio.gather(*lines, return_exceptions=True)
    assert sum(isinstance(one, OSError) for one in found) == 4
    resolver.close()
