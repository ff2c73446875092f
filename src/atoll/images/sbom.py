"""The software bill of materials of an image, as an SPDX 2.3 or a CycloneDX 1.5 document in JSON.

The same image always gives the same document: its times and ids come from the image.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from atoll.errors import SpecError
from atoll.images.contents import Contents, Package
from atoll.images.image import Image

_NAMESPACE = uuid.UUID("a3d9a1c2-5c0f-4f4b-9b56-0a6f2f3b1d77")
_NORMAL = re.compile(r"[-_.]+")


def sbom(image: Image, contents: Contents, form: str) -> dict[str, Any]:
    """Return the document in this form, `spdx` or `cyclonedx`. Raises SpecError for another one."""
    if form not in FORMS:
        raise SpecError(f"{form[:40]!r} is not a form of an SBOM", hint=f"Write {' or '.join(FORMS)}.")
    return FORMS[form](image, contents)


def spdx(image: Image, contents: Contents) -> dict[str, Any]:
    whole = {
        "SPDXID": "SPDXRef-image",
        "name": image.reference,
        "versionInfo": image.digest,
        "downloadLocation": "NOASSERTION",
        "filesAnalyzed": False,
        "licenseConcluded": "NOASSERTION",
        "licenseDeclared": "NOASSERTION",
        "copyrightText": "NOASSERTION",
        "primaryPackagePurpose": "CONTAINER",
    }
    return {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": image.reference,
        "documentNamespace": f"urn:uuid:{_identity(image, 'spdx')}",
        "creationInfo": {"created": _time(image), "creators": ["Tool: atoll"]},
        "documentDescribes": ["SPDXRef-image"],
        "packages": [whole, *(_spdx_package(contents, package) for package in contents.packages)],
        "relationships": [
            _relation("SPDXRef-DOCUMENT", "DESCRIBES", "SPDXRef-image"),
            *(_relation("SPDXRef-image", "CONTAINS", f"SPDXRef-{_id(package)}") for package in contents.packages),
        ],
    }


def _spdx_package(contents: Contents, package: Package) -> dict[str, Any]:
    reference = {
        "referenceCategory": "PACKAGE-MANAGER",
        "referenceType": "purl",
        "referenceLocator": purl(contents, package),
    }
    return {
        "SPDXID": f"SPDXRef-{_id(package)}",
        "name": package.name,
        "versionInfo": package.version,
        "downloadLocation": "NOASSERTION",
        "filesAnalyzed": False,
        "licenseConcluded": "NOASSERTION",
        "licenseDeclared": "NOASSERTION",
        "copyrightText": "NOASSERTION",
        "externalRefs": [reference],
    }


def _id(package: Package) -> str:
    whole = f"{package.kind} {package.name} {package.version} {package.architecture}"
    plain = re.sub(r"[^A-Za-z0-9.]+", "-", package.name)
    return f"{package.kind}-{plain}-{hashlib.sha256(whole.encode()).hexdigest()[:12]}"


def _relation(one: str, kind: str, other: str) -> dict[str, str]:
    return {"spdxElementId": one, "relationshipType": kind, "relatedSpdxElement": other}


def cyclonedx(image: Image, contents: Contents) -> dict[str, Any]:
    whole = {"type": "container", "bom-ref": "image", "name": image.reference, "version": image.digest}
    parts = [
        {
            "type": "library",
            "bom-ref": _id(package),
            "name": package.name,
            "version": package.version,
            "purl": purl(contents, package),
        }
        for package in contents.packages
    ]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{_identity(image, 'cyclonedx')}",
        "version": 1,
        "metadata": {
            "timestamp": _time(image),
            "tools": {"components": [{"type": "application", "name": "atoll"}]},
            "component": whole,
        },
        "components": parts,
        "dependencies": [{"ref": "image", "dependsOn": [part["bom-ref"] for part in parts]}],
    }


FORMS: dict[str, Callable[[Image, Contents], dict[str, Any]]] = {"spdx": spdx, "cyclonedx": cyclonedx}


def purl(contents: Contents, package: Package) -> str:
    """Return the package URL, which names a package among those of all systems."""
    version = quote(package.version, safe=".-_~")
    if package.kind == "pypi":
        return f"pkg:pypi/{_NORMAL.sub('-', package.name).lower()}@{version}"
    if package.kind == "npm":
        return f"pkg:npm/{quote(package.name, safe='/.-_~')}@{version}"
    system = contents.system or "debian"
    qualifiers = [f"arch={package.architecture}"] if package.architecture else []
    qualifiers += [f"distro={system}-{contents.release}"] if contents.release else []
    text = f"pkg:deb/{system}/{quote(package.name, safe='.-_~')}@{version}"
    return f"{text}?{'&'.join(qualifiers)}" if qualifiers else text


def _identity(image: Image, form: str) -> uuid.UUID:
    return uuid.uuid5(_NAMESPACE, f"{form} {image.reference} {image.digest}")


def _time(image: Image) -> str:
    return datetime.fromtimestamp(int(image.created_at), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
