"""The catalogue of specs: those that come with the server, those that users made, and their images fetched ahead."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

from pydantic import BaseModel

from atoll.errors import SandboxError, SpecError
from atoll.manager import SandboxManager
from atoll.model import ImageProgress, Limits
from atoll.network.policy import NetworkPolicy, opens_private
from atoll.service.ceilings import LimitCeilings
from atoll.service.identity import Caller
from atoll.service.models import (
    ExposedPort,
    SandboxSettings,
    SandboxSpecCreate,
    SandboxSpecInfo,
    SandboxSpecInfoPage,
)
from atoll.service.refusals import ForbiddenError, SandboxSpecNotFoundError
from atoll.store import AlreadyThereError, Store, StoredSpec
from atoll.workers import Shares

DEFAULT_ID = "default"
_HOST = "host"
_FETCHES = 16
_FETCHES_OF_ONE = 2
_AHEAD = 1000
_MAX_BODY = 256 << 10
_OF_THE_MACHINE = ("tar:", "docker:")
"""What images begin with that come from the server's own machine and not from a registry."""


class Recipe(BaseModel):
    """A spec of the catalogue as it is stored."""

    settings: SandboxSettings = SandboxSettings()
    command: list[str] | None = None
    exposed_ports: list[ExposedPort] = []


class SandboxSpecService:
    def __init__(
        self,
        store: Store,
        manager: SandboxManager,
        default_spec_id: str = DEFAULT_ID,
        *,
        max_specs: int | None = None,
        ceilings: LimitCeilings | None = None,
    ) -> None:
        """`max_specs` holds for each user who has no quota of their own."""
        self._max_specs = max_specs
        self._store = store
        self.ceilings = ceilings or LimitCeilings(Limits())
        self._manager = manager
        self._default_id = default_spec_id
        self._default_image = _HOST
        self._images: dict[str, tuple[str, str]] = {_HOST: ("ready", "")}
        self._progress: dict[str, ImageProgress] = {}
        self._fetching: dict[str, asyncio.Task[None]] = {}
        self._slots = Shares(_FETCHES, _FETCHES_OF_ONE)

    async def prepare(self) -> None:
        """A catalogue is never empty: `default` is a sandbox over this machine's own /usr, or of the engine's default
        image where there is no such thing. Images of the specs that
        are there are fetched in the background, which is quick if they are here."""
        self._default_image = await self._manager.default_image()
        if await self._store.spec(self._default_id, None) is None:
            body = Recipe().model_dump_json()
            now = datetime.now(UTC)
            await self._store.add_spec(StoredSpec(id=self._default_id, owner_id=None, body=body, created_at=now))
        for spec in await self._store.specs(owner_id=None, everybodys=True, limit=_AHEAD):
            self._fetch(Recipe.model_validate_json(spec.body).settings.image)

    async def aclose(self) -> None:
        for task in self._fetching.values():
            task.cancel()
        await asyncio.gather(*self._fetching.values(), return_exceptions=True)

    async def search_sandbox_specs(
        self, caller: Caller, page_id: str | None = None, limit: int = 100
    ) -> SandboxSpecInfoPage:
        """By id. `page_id` is where the page before ended."""
        spec_id, _, owner = (page_id or "").partition("~")
        found = await self._store.specs(
            owner_id=caller.user_id, everybodys=caller.is_admin, after=(spec_id, owner), limit=limit + 1
        )
        more = f"{found[limit - 1].id}~{found[limit - 1].owner_id or ''}" if len(found) > limit else None
        return SandboxSpecInfoPage(items=[self._info(spec) for spec in found[:limit]], next_page_id=more)

    async def get_sandbox_spec(self, caller: Caller, spec_id: str) -> SandboxSpecInfo | None:
        found = await self._visible(caller, spec_id)
        return self._info(found) if found is not None else None

    async def get_default_sandbox_spec(self, caller: Caller) -> SandboxSpecInfo:
        found = await self.get_sandbox_spec(caller, self._default_id)
        if found is None:
            raise SandboxSpecNotFoundError("No sandbox specs available!", hint="An administrator can make one.")
        return found

    async def batch_get_sandbox_specs(self, caller: Caller, spec_ids: list[str]) -> list[SandboxSpecInfo | None]:
        """In the order asked for; None for what is not there."""
        return [await self.get_sandbox_spec(caller, spec_id) for spec_id in spec_ids]

    async def create_sandbox_spec(self, caller: Caller, wanted: SandboxSpecCreate) -> SandboxSpecInfo:
        """AlreadyThereError if the caller or everybody has one of that id, LimitReachedError for one too many.
        Its image is fetched in the background."""
        self.check(caller, wanted.settings)
        if wanted.shared and not caller.is_admin:
            raise ForbiddenError("only administrators share a spec with everybody")
        wanted.settings.spec()
        recipe = Recipe(settings=wanted.settings, command=wanted.command, exposed_ports=wanted.exposed_ports)
        spec = StoredSpec(
            id=wanted.id,
            owner_id=None if wanted.shared else caller.user_id,
            body=recipe.model_dump_json(),
            created_at=datetime.now(UTC),
        )
        if len(spec.body) > _MAX_BODY:
            raise SpecError(f"the spec has {len(spec.body):,} characters; {_MAX_BODY:,} are possible")
        own = caller.quotas.max_specs
        try:
            await self._store.add_spec(spec, most=None if wanted.shared else self._max_specs if own is None else own)
        except AlreadyThereError as error:
            raise AlreadyThereError(error.reason, hint="Choose another id.") from error
        self._fetch(wanted.settings.image)
        return self._info(spec)

    async def pull_sandbox_spec(self, caller: Caller, spec_id: str) -> SandboxSpecInfo:
        """Fetch its image now, or again after a failure. Returns at once: `image_progress` says how far it is."""
        found = await self._visible(caller, spec_id)
        if found is None:
            raise SandboxSpecNotFoundError(f"Sandbox Spec not found: {spec_id[:128]!r}")
        self._fetch(Recipe.model_validate_json(found.body).settings.image)
        return self._info(found)

    async def delete_sandbox_spec(self, caller: Caller, spec_id: str) -> bool:
        """False: there is none that this caller can see. Sandboxes that were made from it stay."""
        found = await self._visible(caller, spec_id)
        if found is None:
            return False
        if found.owner_id is None and not caller.is_admin:
            raise ForbiddenError("only administrators remove what is everybody's")
        return await self._store.remove_spec(spec_id, found.owner_id)

    async def recipe(self, caller: Caller, spec_id: str | None) -> tuple[str, Recipe]:
        """What to make a sandbox from. Raises SandboxSpecNotFoundError, and ForbiddenError if it is one of the caller's
        own with more than the server's ceilings allow."""
        wanted = spec_id or self._default_id
        found = await self._visible(caller, wanted)
        if found is None:
            raise SandboxSpecNotFoundError(f"Sandbox Spec not found: {wanted[:128]!r}")
        recipe = Recipe.model_validate_json(found.body)
        if found.owner_id is not None:  # what administrators share with everybody may have more
            self.ceilings.check(caller, recipe.settings.limits)
        return wanted, recipe

    def check(self, caller: Caller, settings: SandboxSettings) -> None:
        """Raises ForbiddenError for what only administrators may ask for."""
        if settings.volumes and not caller.is_admin:
            raise ForbiddenError("only administrators share directories of the server's machine")
        if settings.image.startswith(_OF_THE_MACHINE) and not caller.is_admin:
            raise ForbiddenError(
                f"only administrators use files of the server's machine as images: {settings.image[:80]!r}"
            )
        self.check_network(caller, settings.network)
        self.ceilings.check(caller, settings.limits)

    def check_network(self, caller: Caller, policy: NetworkPolicy) -> None:
        if opens_private(policy) and not caller.is_admin:
            raise ForbiddenError("only administrators open private ranges: they are those of the server's network")

    async def _visible(self, caller: Caller, spec_id: str) -> StoredSpec | None:
        """The caller's own, else everybody's; administrators see any other as well."""
        found = await self._store.spec(spec_id, caller.user_id) or await self._store.spec(spec_id, None)
        if found is None and caller.is_admin:
            return next(iter(await self._store.specs_named(spec_id)), None)
        return found

    def _info(self, spec: StoredSpec) -> SandboxSpecInfo:
        recipe = Recipe.model_validate_json(spec.body)
        image = self._named(recipe.settings.image)
        status, detail = self._images.get(image, ("pending", "it is fetched when it is first needed"))
        return SandboxSpecInfo.model_validate(
            {
                "id": spec.id,
                "command": recipe.command,
                "created_at": spec.created_at,
                "initial_env": recipe.settings.env,
                "working_dir": recipe.settings.work_dir,
                "image": image,
                "isolation": recipe.settings.isolation,
                "limits": recipe.settings.limits,
                "exposed_ports": recipe.exposed_ports,
                "owner_id": spec.owner_id,
                "is_default": spec.id == self._default_id,
                "image_status": status,
                "image_detail": detail,
                "image_progress": self._progress.get(image),
            }
        )

    def _named(self, image: str) -> str:
        return self._default_image if image == _HOST else image

    def _fetch(self, image: str) -> None:
        image = self._named(image)
        if image.startswith("snapshot:"):
            return  # whose it is, and whether it is there, is seen when somebody asks for a sandbox
        if image in self._fetching or self._images.get(image, ("",))[0] == "ready":
            return
        self._images[image] = ("pulling", "")
        task = self._fetching[image] = asyncio.create_task(self._ensure(image), name=f"fetch {image}")
        task.add_done_callback(lambda _: self._fetching.pop(image, None))

    async def _ensure(self, image: str) -> None:
        def report(step: ImageProgress) -> None:
            self._progress[image] = step

        try:
            async with self._slots.slot():
                await self._manager.fetch_image(image, on_progress=report)
            self._images[image] = ("ready", "")
        except SandboxError as error:
            self._images[image] = ("failed", str(error))
        finally:
            self._progress.pop(image, None)
