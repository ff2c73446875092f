"""The catalogue of specs: the default spec and those of users. Their images are fetched in advance."""

from __future__ import annotations

import asyncio
import dataclasses
from datetime import UTC, datetime

from pydantic import BaseModel

from atoll.errors import ConflictError, SandboxError, SpecError
from atoll.images.access import OPERATOR, Access, pulling_with
from atoll.images.registry_login import Credentials
from atoll.manager import SandboxManager
from atoll.model import DEFAULT_WORK_DIR, ImageProgress, Limits
from atoll.model.named_specs import NAMED, options_of
from atoll.model.network_policy import NetworkPolicy, opens_private
from atoll.service.caller import Caller
from atoll.service.exposed_ports import merged, port_of
from atoll.service.failures import ForbiddenError, SandboxSpecNotFoundError, without_paths
from atoll.service.models.catalogue import SandboxSpecInfo, SandboxSpecInfoPage, SandboxSpecRequest
from atoll.service.models.exposed_port import ExposedPort, HealthCheck
from atoll.service.models.sandbox_request import MAX_SETTINGS, RegistryLogin, SandboxSettings
from atoll.service.quotas import LimitCeilings
from atoll.store import Quotas, Role, Store, StoredSpec
from atoll.workers import Shares

DEFAULT_ID = "default"
_HOST = "host"
_FETCHES = 16
_FETCHES_OF_ONE = 2
_AHEAD = 1000
_OF_THE_MACHINE = ("tar:", "docker:")
"""Prefixes of images that come from the server's own machine and not from a registry."""


_Fetch = tuple[str | None, str]
"""The owner of the spec, and the image."""
_PUBLIC_ONLY = Access(guarded=True)


class Recipe(BaseModel):
    """A spec of the catalogue as it is stored."""

    settings: SandboxSettings = SandboxSettings()
    command: list[str] | None = None
    exposed_ports: list[ExposedPort] = []
    health: HealthCheck | None = None
    callback: bool = False

    def ports(self) -> list[ExposedPort]:
        """Return the ports by name. If two have the same name, as older servers allowed, the last one counts."""
        return list({port.name: port for port in self.exposed_ports}.values())


def _built_in(name: str) -> StoredSpec:
    """Return a spec that comes with Atoll. It is in no store and no list, and one of the same id comes before it."""
    settings = SandboxSettings.model_validate(options_of(name))
    made_at = datetime.fromtimestamp(0, UTC)
    return StoredSpec(id=name, owner_id=None, body=Recipe(settings=settings).model_dump_json(), created_at=made_at)


class SandboxSpecService:
    def __init__(
        self,
        store: Store,
        manager: SandboxManager,
        default_spec_id: str = DEFAULT_ID,
        *,
        max_specs: int | None = None,
        max_images: int | None = None,
        max_image_bytes: int | None = None,
        ceilings: LimitCeilings | None = None,
        access: Access = _PUBLIC_ONLY,
    ) -> None:
        """`max_specs` applies to each user who has no quota of their own, and `access` to pulls for users who are not
        administrators, with `max_images` and `max_image_bytes`."""
        self._max_specs = max_specs
        self._max_images, self._max_image_bytes = max_images, max_image_bytes
        self._access = access
        self._store = store
        self.ceilings = ceilings or LimitCeilings(Limits())
        self._manager = manager
        self._default_id = default_spec_id
        self._default_image = _HOST
        self._images: dict[_Fetch, tuple[str, str]] = {}
        """Status and detail of each fetched image, kept by owner, because one owner's access says nothing about
        another's."""
        self._progress: dict[_Fetch, ImageProgress] = {}
        self._fetching: dict[_Fetch, asyncio.Task[None]] = {}
        self._slots = Shares(_FETCHES, _FETCHES_OF_ONE)

    async def prepare(self) -> None:
        """Add the default spec if it is missing, so that the catalogue is never empty, and fetch the images of all
        specs in the background.

        The default spec is a sandbox over this machine's own /usr, or of the engine's default image where the machine
        has none. Fetching an image that is already present is quick.
        """
        self._default_image = await self._manager.default_image()
        if await self._store.spec(self._default_id, None) is None:
            body = Recipe().model_dump_json()
            now = datetime.now(UTC)
            await self._store.add_spec(StoredSpec(id=self._default_id, owner_id=None, body=body, created_at=now))
        for spec in await self._store.specs(owner_id=None, everybodys=True, limit=_AHEAD):
            self._fetch(spec, await self._access_of(spec))

    async def aclose(self) -> None:
        for task in self._fetching.values():
            task.cancel()
        await asyncio.gather(*self._fetching.values(), return_exceptions=True)

    async def search_sandbox_specs(
        self, caller: Caller, page_id: str | None = None, limit: int = 100
    ) -> SandboxSpecInfoPage:
        """Return specs sorted by id. `page_id` says where the previous page ended."""
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
            raise SandboxSpecNotFoundError("No sandbox specs available!", hint="An administrator can create one.")
        return found

    async def batch_get_sandbox_specs(self, caller: Caller, spec_ids: list[str]) -> list[SandboxSpecInfo | None]:
        """Return specs in the order of the ids, with None for each one that does not exist."""
        return [await self.get_sandbox_spec(caller, spec_id) for spec_id in spec_ids]

    async def create_sandbox_spec(self, caller: Caller, wanted: SandboxSpecRequest) -> SandboxSpecInfo:
        """Add a spec to the catalogue and fetch its image in the background. Raises ConflictError if the caller has
        a spec of this id or a shared spec has it, and LimitReachedError if there are too many."""
        self.check(caller, wanted.settings)
        if wanted.shared and not caller.is_admin:
            raise ForbiddenError("only administrators may share a spec with everybody")
        wanted.settings.spec()
        recipe = Recipe(
            settings=wanted.settings,
            command=wanted.command,
            exposed_ports=merged(wanted.exposed_ports),
            health=wanted.health,
            callback=wanted.callback,
        )
        if wanted.health is not None:
            port_of(wanted.health, recipe.exposed_ports)
        spec = StoredSpec(
            id=wanted.id,
            owner_id=None if wanted.shared else caller.user_id,
            body=recipe.model_dump_json(),
            created_at=datetime.now(UTC),
        )
        if len(spec.body) > MAX_SETTINGS:
            raise SpecError(f"the spec has {len(spec.body):,} characters; the limit is {MAX_SETTINGS:,}")
        own = caller.quotas.max_specs
        try:
            await self._store.add_spec(spec, most=None if wanted.shared else self._max_specs if own is None else own)
        except ConflictError as error:
            raise ConflictError(error.reason, hint="Choose another id.") from error
        self._fetch(spec, self.access(caller, wanted.registry_login, spec))
        return self._info(spec)

    async def pull_sandbox_spec(
        self, caller: Caller, spec_id: str, login: RegistryLogin | None = None
    ) -> SandboxSpecInfo:
        """Fetch the image of a spec now, or again after a failure. Returns at once; `image_progress` shows the
        progress."""
        found = await self._visible(caller, spec_id)
        if found is None:
            raise SandboxSpecNotFoundError(f"Sandbox Spec not found: {spec_id[:128]!r}")
        self._fetch(found, self.access(caller, login, found))
        return self._info(found)

    async def delete_sandbox_spec(self, caller: Caller, spec_id: str) -> bool:
        """Delete a spec. Returns False if the caller can see no such spec. Sandboxes that were made from it stay."""
        found = await self._visible(caller, spec_id)
        if found is None:
            return False
        if found.owner_id is None and not caller.is_admin:
            raise ForbiddenError("only administrators may delete a shared spec")
        removed = await self._store.remove_spec(spec_id, found.owner_id)
        await self._forget(found)
        return removed

    async def recipe(self, caller: Caller, spec_id: str | None) -> tuple[StoredSpec, Recipe]:
        """Return the spec to make a sandbox from. Raises SandboxSpecNotFoundError, and ForbiddenError if it is one of
        the caller's own and exceeds the server's maximum limits."""
        wanted = spec_id or self._default_id
        found = await self._visible(caller, wanted)
        if found is None:
            raise SandboxSpecNotFoundError(f"Sandbox Spec not found: {wanted[:128]!r}")
        recipe = Recipe.model_validate_json(found.body)
        if found.owner_id is not None:  # specs that administrators share may have more
            self.ceilings.check(caller, recipe.settings.limits)
        return found, recipe

    def access(self, caller: Caller, login: RegistryLogin | None = None, spec: StoredSpec | None = None) -> Access:
        """Return how images are pulled for this caller. A shared spec comes from an administrator, who answers for its
        image."""
        vouched = caller.is_admin or (spec is not None and spec.owner_id is None)
        own = Credentials(login.username, login.password) if login is not None else None
        access = dataclasses.replace(OPERATOR if vouched else self._access, login=own)
        if spec is not None and spec.owner_id is None:
            return access  # the image will be everybody's, like the spec
        return self._owned(access, caller.user_id, caller.quotas, is_admin=caller.is_admin)

    def _owned(self, access: Access, user_id: str, quotas: Quotas, *, is_admin: bool) -> Access:
        """Return an access whose images belong to this user and count for them."""
        most, most_bytes = (None, None) if is_admin else (self._max_images, self._max_image_bytes)
        return dataclasses.replace(
            access,
            owner=user_id,
            most_images=most if quotas.max_images is None else quotas.max_images,
            most_bytes=most_bytes if quotas.max_image_bytes is None else quotas.max_image_bytes,
        )

    async def _access_of(self, spec: StoredSpec) -> Access:
        """Return how the image of a spec is pulled when the server itself fetches it at its start."""
        if spec.owner_id is None:
            return OPERATOR
        owner = await self._store.user(spec.owner_id)
        is_admin = owner is not None and owner.role is Role.ADMIN
        quotas = owner.quotas if owner is not None else Quotas()
        return self._owned(OPERATOR if is_admin else self._access, spec.owner_id, quotas, is_admin=is_admin)

    async def _forget(self, spec: StoredSpec) -> None:
        """Forget the state of the spec's image, unless another spec of the same owner has it too."""
        place = self._fetch_of(spec)
        mine = await self._store.specs(owner_id=spec.owner_id or "", everybodys=False, limit=_AHEAD)
        if place in {self._fetch_of(each) for each in mine}:
            return
        self._images.pop(place, None)
        if (task := self._fetching.get(place)) is not None:
            task.cancel()

    def check(self, caller: Caller, settings: SandboxSettings) -> None:
        """Raise ForbiddenError for settings that only administrators may use."""
        if any(volume.host for volume in settings.volumes) and not caller.is_admin:
            raise ForbiddenError(
                "only administrators may mount directories of the server's machine",
                hint="Mount a volume by its name, without a slash: 'data:/data'.",
            )
        self.check_image(caller, settings.image)
        self.check_network(caller, settings.network)
        self.ceilings.check(caller, settings.limits)

    def check_image(self, caller: Caller, image: str) -> None:
        if image.startswith(_OF_THE_MACHINE) and not caller.is_admin:
            raise ForbiddenError(f"only administrators may use files of the server's machine as images: {image[:80]!r}")

    def check_network(self, caller: Caller, policy: NetworkPolicy) -> None:
        if opens_private(policy) and not caller.is_admin:
            raise ForbiddenError("only administrators may open private address ranges: the server's own network is one")

    async def _visible(self, caller: Caller, spec_id: str) -> StoredSpec | None:
        """Return the caller's own spec, else the shared one. Administrators also see any other."""
        found = await self._store.spec(spec_id, caller.user_id) or await self._store.spec(spec_id, None)
        if found is None and spec_id in NAMED:
            return _built_in(spec_id)
        if found is None and caller.is_admin:
            return next(iter(await self._store.specs_named(spec_id)), None)
        return found

    def _info(self, spec: StoredSpec) -> SandboxSpecInfo:
        recipe = Recipe.model_validate_json(spec.body)
        place = self._fetch_of(spec)
        unknown = ("ready", "") if place[1] == _HOST else ("pending", "it is fetched when first needed")
        status, detail = self._images.get(place, unknown)
        return SandboxSpecInfo.model_validate(
            {
                "id": spec.id,
                "command": recipe.command,
                "created_at": spec.created_at,
                "initial_env": recipe.settings.env,
                "working_dir": recipe.settings.work_dir or DEFAULT_WORK_DIR,
                "image": place[1],
                "isolation": recipe.settings.isolation,
                "limits": recipe.settings.limits,
                "exposed_ports": recipe.exposed_ports,
                "health": recipe.health,
                "callback": recipe.callback,
                "owner_id": spec.owner_id,
                "is_default": spec.id == self._default_id,
                "image_status": status,
                "image_detail": detail,
                "image_progress": self._progress.get(place),
            }
        )

    def _fetch_of(self, spec: StoredSpec) -> _Fetch:
        image = Recipe.model_validate_json(spec.body).settings.image
        return spec.owner_id, self._default_image if image == _HOST else image

    def _fetch(self, spec: StoredSpec, access: Access) -> None:
        place = self._fetch_of(spec)
        if place[1] == _HOST or place[1].startswith("snapshot:"):
            return  # the owner and existence of a snapshot are checked when a sandbox is requested
        if place in self._fetching or self._images.get(place, ("",))[0] == "ready":
            return
        self._images[place] = ("pulling", "")
        task = self._fetching[place] = asyncio.create_task(self._ensure(place, access), name=f"fetch {place[1]}")
        task.add_done_callback(lambda _: self._fetching.pop(place, None))

    async def _ensure(self, place: _Fetch, access: Access) -> None:
        def report(step: ImageProgress) -> None:
            self._progress[place] = step

        try:
            async with self._slots.slot():
                with pulling_with(access):
                    await self._manager.fetch_image(place[1], on_progress=report)
            self._images[place] = ("ready", "")
        except SandboxError as error:
            self._images[place] = ("failed", without_paths(str(error)))
        finally:
            self._progress.pop(place, None)
