"""The drafters by name. Importing it imports none of them."""

DRAFTERS = {  # by name, in the order of preference
    "none": "exspec.actors.engine.drafters.drafter:NoDraft",
    "model": "exspec.actors.engine.drafters.model:DraftModel",
    "eagle3": "exspec.actors.engine.drafters.eagle3:Eagle3",
    "clover": "exspec.actors.engine.drafters.clover:Clover",
    "dflash": "exspec.actors.engine.drafters.dflash:DFlash",
    "suffix": "exspec.actors.engine.drafters.suffix:Suffix",
    "early_exit": "exspec.actors.engine.drafters.early_exit:EarlyExit",
    "sparse": "exspec.actors.engine.drafters.sparse:Sparse",
}
NONE = "none"


def check_name(name: str) -> None:
    """Raises ValueError for a drafter that is not registered."""
    if name not in DRAFTERS:
        raise ValueError(f"drafter: expected one of {', '.join(DRAFTERS)}, not {name!r}")
