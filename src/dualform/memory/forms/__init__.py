"""What a layer can do with a parameter: one file a form; a new form is a new file and a line here.

a matrix product      a = error            b = input
an offset (a bias)    a = error            b = 1
a scale               a = error ∘ input    b = 1
a table that is read  a = the row's place  b = error
"""

from dualform.errors import FormatVersionError
from dualform.memory.forms.form import Form
from dualform.memory.forms.lookup import LookupForm
from dualform.memory.forms.offset import OffsetForm
from dualform.memory.forms.outer import OuterForm
from dualform.memory.forms.scale import ScaleForm

FORMS: dict[str, Form] = {
    form.name: form for form in (OuterForm(), OffsetForm(), ScaleForm(), LookupForm())
}


def form_named(name: str) -> Form:
    """The form that a ledger says a parameter has.

    >>> form_named("sum").needs_keys
    False
    """
    if name not in FORMS:
        raise FormatVersionError(
            f"the run has a parameter of the form '{name}', and this dualform knows "
            f"{', '.join(FORMS)}; update with `pip install -U dualform`."
        )
    return FORMS[name]


__all__ = ["FORMS", "Form", "LookupForm", "OffsetForm", "OuterForm", "ScaleForm", "form_named"]
