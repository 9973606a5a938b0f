"""``slipway sign`` and ``verify``: signatures of releases."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipeline.commands.options import Commands, LocalOptions, ModelArgument, ReleaseOption
from pipeline.runs.engine import Printout
from stages.parts.base.errors import ConfigError

commands = Commands()


@commands.add("sign org/name --key signing.pem")
def sign(
    model: ModelArgument,
    key: Annotated[
        Path,
        typer.Option(envvar="SLIPWAY_SIGNING_KEY", help="The private key: PEM, of the curve P-256, P-384 or P-521."),
    ],
    certificate: Annotated[
        Path | None,
        typer.Option(envvar="SLIPWAY_SIGNING_CERTIFICATE", help="Its certificate, then those up to the root, as PEM."),
    ] = None,
    release: ReleaseOption = None,
    *,
    options: LocalOptions,
) -> Printout:
    """Sign a release that is there already.

    Where SLIPWAY_SIGNING_KEY is set, runs sign what they publish.
    """
    from stages.parts.releases.signing import sign as sign_release

    folder = options.release_of(model, release)
    sign_release(folder, key, certificate)
    return Printout({"model": model, "release": folder.name, "signed": True}, f"signed {folder.name}")


@commands.add("verify org/name --key signing.pub")
def verify(
    model: ModelArgument,
    key: Annotated[Path | None, typer.Option(help="Public key or roots. Default: serving.verification_key.")] = None,
    release: ReleaseOption = None,
    *,
    options: LocalOptions,
) -> Printout:
    """Compare every byte of a release with its signature.

    Its provenance and its bill of materials must name the same files. Exit code 46 if it is not signed by that key, or
    was altered. Needs no network.
    """
    from stages.parts.releases.signing import signer_of
    from stages.parts.releases.signing import verify as verify_release

    public_key = key or options.load(platform="local").serving.verification_key
    if public_key is None:
        raise ConfigError("no key to verify with", hint="--key signing.pub, or serving.verification_key")
    folder = options.release_of(model, release)
    origin, signer = verify_release(folder, Path(public_key)), signer_of(folder)
    text = f"{folder.name} is what {public_key} signed ({signer[:16]}…{signer[64:]})"
    if origin:
        made, by = origin["buildDefinition"], origin["runDetails"]
        sources = (f"{each['name']} at {each['annotations']['commit']}" for each in made["resolvedDependencies"][:1])
        text += f"\nmade of {', '.join(sources)} by slipway {by['builder']['version']['slipway']}"
        text += f", run {by['metadata']['invocationId'] or 'unknown'}"
    else:
        text += "\nit has no provenance: an older version published it"
    document = {"model": model, "release": folder.name, "verified": True, "signer": signer, "provenance": origin}
    return Printout(document, text)
