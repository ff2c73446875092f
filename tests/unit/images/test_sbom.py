"""Bills of materials have the form that SPDX 2.3 and CycloneDX 1.5 require, and the same image gives the same one."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from atoll.errors import SpecError
from atoll.images import Image, Kind
from atoll.images.contents import Contents, Package
from atoll.images.sbom import FORMS, purl, sbom

IMAGE = Image("computer", Kind.ENVIRONMENT, "sha256:" + "a" * 64, created_at=1_700_000_000.5)
CONTENTS = Contents(
    (
        Package("debian", "g++", "4:14.2.0-1", "amd64"),
        Package("npm", "@npmcli/agent", "4.0.2"),
        Package("pypi", "Foo_Bar", "1.0"),
        Package("pypi", "foo.bar", "1.0"),
    ),
    "debian",
    "13",
)
ID = r"^SPDXRef-[a-zA-Z0-9.-]+$"
TIME = r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$"
PURL = r"^pkg:(deb|pypi|npm)/[A-Za-z0-9./%_~-]+@[A-Za-z0-9.%_~-]+(\?[a-z0-9=&.-]+)?$"
REQUIRED: dict[str, Any] = {
    "spdx": {
        "required": ["spdxVersion", "dataLicense", "SPDXID", "name", "documentNamespace", "creationInfo", "packages"],
        "properties": {
            "spdxVersion": {"const": "SPDX-2.3"},
            "dataLicense": {"const": "CC0-1.0"},
            "SPDXID": {"const": "SPDXRef-DOCUMENT"},
            "documentNamespace": {"pattern": "^urn:uuid:[0-9a-f-]{36}$"},
            "creationInfo": {
                "required": ["created", "creators"],
                "properties": {
                    "created": {"pattern": TIME},
                    "creators": {"items": {"pattern": "^(Tool|Person|Organization): "}, "minItems": 1},
                },
            },
            "packages": {
                "items": {
                    "required": ["SPDXID", "name", "downloadLocation"],
                    "properties": {
                        "SPDXID": {"pattern": ID},
                        "filesAnalyzed": {"const": False},
                        "externalRefs": {
                            "items": {
                                "required": ["referenceCategory", "referenceType", "referenceLocator"],
                                "properties": {"referenceLocator": {"pattern": PURL}},
                            }
                        },
                    },
                }
            },
            "relationships": {
                "items": {
                    "required": ["spdxElementId", "relationshipType", "relatedSpdxElement"],
                    "properties": {"relationshipType": {"enum": ["DESCRIBES", "CONTAINS"]}},
                }
            },
        },
    },
    "cyclonedx": {
        "required": ["bomFormat", "specVersion"],
        "additionalProperties": False,
        "properties": {
            "bomFormat": {"const": "CycloneDX"},
            "specVersion": {"const": "1.5"},
            "serialNumber": {"pattern": "^urn:uuid:[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"},
            "version": {"type": "integer", "minimum": 1},
            "metadata": {"properties": {"timestamp": {"pattern": TIME}}},
            "dependencies": {"items": {"required": ["ref"]}},
            "components": {
                "uniqueItems": True,
                "items": {
                    "required": ["type", "name"],
                    "additionalProperties": False,
                    "properties": {
                        "type": {"const": "library"},
                        "bom-ref": {"type": "string", "minLength": 1},
                        "name": {"type": "string"},
                        "version": {"type": "string"},
                        "purl": {"pattern": PURL},
                    },
                },
            },
        },
    },
}
"""What the two schemas require of the parts that are used."""


@pytest.mark.parametrize("form", sorted(FORMS))
def test_a_bill_of_materials_has_the_required_form(form: str) -> None:
    found = sbom(IMAGE, CONTENTS, form)
    jsonschema.validate(found, {"type": "object", **REQUIRED[form]})
    assert found == sbom(IMAGE, CONTENTS, form)


def test_every_package_is_listed_once_and_every_reference_leads_to_one() -> None:
    spdx, cyclonedx = sbom(IMAGE, CONTENTS, "spdx"), sbom(IMAGE, CONTENTS, "cyclonedx")
    ids = [package["SPDXID"] for package in spdx["packages"]]
    assert len(set(ids)) == len(ids) == len(CONTENTS.packages) + 1
    assert {each["relatedSpdxElement"] for each in spdx["relationships"]} == set(ids)
    refs = [component["bom-ref"] for component in cyclonedx["components"]]
    assert len(set(refs)) == len(refs) == len(CONTENTS.packages)
    assert cyclonedx["dependencies"] == [{"ref": "image", "dependsOn": refs}]


def test_package_urls_are_escaped_and_in_normal_form() -> None:
    assert [purl(CONTENTS, package) for package in CONTENTS.packages] == [
        "pkg:deb/debian/g%2B%2B@4%3A14.2.0-1?arch=amd64&distro=debian-13",
        "pkg:npm/%40npmcli/agent@4.0.2",
        "pkg:pypi/foo-bar@1.0",
        "pkg:pypi/foo-bar@1.0",
    ]


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(SpecError, match="not a form"):
        sbom(IMAGE, CONTENTS, "text")
