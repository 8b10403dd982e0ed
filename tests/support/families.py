"""Every family that is tested, and where to find its row."""

from __future__ import annotations

from families_dense import DENSE
from families_diffusion import DIFFUSION
from families_drafts import DRAFTS
from families_experts import ONE_BY_ONE
from families_hybrid import HYBRID
from families_newest import NEWEST
from families_pictures import PICTURES
from families_stacked import STACKED

FAMILIES = (*DENSE, *ONE_BY_ONE, *HYBRID, *STACKED, *DIFFUSION, *PICTURES, *DRAFTS, *NEWEST)
