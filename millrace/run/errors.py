"""What a failed run prints about its error."""

from millrace.config import ConfigurationError, as_typed
from millrace.user_code import UserLine, find_user_line


def format_error(error: Exception) -> str:
    """Return one line about an error, and a second one with the user's own code.

    Errors of other packages need their type.
    """
    text = as_typed(error_message(error))
    if not _is_ours(error):
        text = f"{type(error).__name__}: {text} (--debug shows the traceback)"
    line = find_line(error)
    return text if line is None else f"{text}\n  {line}"


def find_line(error: Exception) -> UserLine | None:
    """Return the line of the user's code that raised an error, or the cause of ours."""
    if isinstance(error, ConfigurationError):
        return None
    raised = error.__cause__ if _is_ours(error) else error
    return find_user_line(raised) if raised is not None else None


def _is_ours(error: Exception) -> bool:
    return type(error).__module__.startswith("millrace")


def error_message(error: Exception) -> str:
    """Return the message of an error in one line."""
    return " ".join(str(error).split()) or type(error).__name__
