"""Files of other tools: prime-rl's of versions 0.8 and 0.9, and verifiers' evaluations and prompt optimisation.

Their keys are translated by one table of renamings (`table_*.py`), which is data: a key of theirs, ours or the reason
why there is none, and a rule for its value. What is in a file is never ignored in silence:

    translated     it has a counterpart, and its value is what ours means by it
    at a default   it says what is so anyway (`neutral` of its row): not mentioned
    noted          no counterpart, and nothing that is learnt depends on it
    refused        no counterpart, and without it something else would be learnt, or it would run elsewhere: a command
                   stops, `primerl convert` lists it and drops it

and what their program takes for an unset key is written down where ours takes something else.
"""

from primerl.config.foreign.rows import Row
from primerl.config.foreign.table import KINDS, Kind, kind_of, rows
from primerl.config.foreign.translate import Translation, translate

__all__ = ["KINDS", "Kind", "Row", "Translation", "kind_of", "rows", "translate"]
