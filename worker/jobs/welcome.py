"""send_welcome_email, over SMTP."""

import hashlib
import re
import smtplib
import ssl
import unicodedata
from contextlib import closing, suppress
from email import policy
from email.headerregistry import Address
from email.message import EmailMessage
from email.utils import localtime
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from pgqueue import Context, GiveUp, InDoubt
from pgqueue.settings import Settings
from pgqueue.worker.jobs.base import app, settings

TIMEOUT = 30.0
"""Seconds that the server may take for one answer."""

SEVEN_BIT = policy.SMTP.clone(cte_type="7bit")
"""Not every server takes more."""

LOOPBACK = ("localhost", "127.0.0.1", "::1")

_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_ADDRESS = re.compile(rf"{_ATOM}(?:\.{_ATOM})*@{_LABEL}(?:\.{_LABEL})*")


def email_address(text: str) -> str:
    """The address as SMTP takes it, or ValueError."""
    user, _, domain = text.rpartition("@")
    with suppress(UnicodeError):  # what cannot be encoded will not match
        text = f"{user}@{domain.encode('idna').decode()}"
    if not _ADDRESS.fullmatch(text) or len(user) > 64 or len(text) > 254:
        raise ValueError("must be an e-mail address such as ana@example.org")
    return text


Email = Annotated[str, AfterValidator(email_address), Field(json_schema_extra={"format": "email"})]


@app.job(executor="thread", once_per=("email", "name"), at_most_once=True)
def send_welcome_email(ctx: Context, email: Email, name: Annotated[str, Field(max_length=200)]) -> dict[str, Any]:
    config = settings()
    message = welcome(ctx, config, email, name)
    ctx.check()
    try:
        deliver(config, message)
    except smtplib.SMTPNotSupportedError as error:
        raise GiveUp(f"{config.smtp_host}: {error}") from error
    except (smtplib.SMTPResponseException, smtplib.SMTPRecipientsRefused) as error:
        code, words = answer(error)
        if code >= 500:
            raise GiveUp(f"{config.smtp_host} refused for good: {code} {words}") from error
        raise
    # The message is out: from here on nothing may fail, or a retry would send another.
    told, message_id = f"Successfully sent welcome email to {email}", str(message["Message-ID"])
    ctx.log(told, message_id=message_id)
    return {"message": told, "message_id": message_id}


def welcome(ctx: Context, config: Settings, email: str, name: str) -> EmailMessage:
    if not config.smtp_host:
        raise GiveUp("no mail server: set SMTP_HOST (and SMTP_PORT, SMTP_EMAIL, SMTP_PASSWORD)")
    if not config.smtp_email:
        raise GiveUp("no sender: set SMTP_EMAIL")
    # Line breaks become spaces; other control characters have no place in a header.
    name = "".join(each for each in " ".join(name.split()) if unicodedata.category(each) != "Cc")
    message = EmailMessage(SEVEN_BIT)
    try:
        sender = email_address(config.smtp_email)
    except ValueError as error:
        raise GiveUp(f"SMTP_EMAIL {error}") from None
    try:
        recipient = email_address(email)
    except ValueError as error:
        raise GiveUp(f"email {error}") from None
    message["To"] = Address(name, addr_spec=recipient)
    message["From"] = Address(addr_spec=sender)
    message["Subject"] = "Welcome"
    message["Date"] = localtime()
    # The same for every attempt, so that mail servers and readers can tell a repetition.
    once = hashlib.sha256("\0".join([ctx.type, ctx.idempotency_key, recipient]).encode()).hexdigest()[:40]
    message["Message-ID"] = f"<{once}@{sender.rpartition('@')[2]}>"
    message["Auto-Submitted"] = "auto-generated"
    message.set_content(f"Welcome {name}!\n" if name else "Welcome!\n")
    return message


def deliver(config: Settings, message: EmailMessage) -> None:
    host, port = config.smtp_host or "", config.smtp_port
    with closing(connected(host, port)) as smtp:
        smtp.ehlo_or_helo_if_needed()
        encrypted = isinstance(smtp, smtplib.SMTP_SSL)
        if not encrypted and smtp.has_extn("starttls"):
            smtp.starttls(context=ssl.create_default_context())
            encrypted = True
        if config.smtp_password:
            if not encrypted and host not in LOOPBACK:
                raise GiveUp(f"{host} offers no STARTTLS: SMTP_PASSWORD would cross the network in the clear")
            smtp.login(config.smtp_email or "", config.smtp_password)
        try:
            smtp.send_message(message)
        except (smtplib.SMTPSenderRefused, smtplib.SMTPRecipientsRefused, smtplib.SMTPNotSupportedError):
            raise  # these are OSErrors, too, but the server has said that it did not take the message
        except OSError as error:
            if isinstance(error, smtplib.SMTPDataError) and 400 <= error.smtp_code < 600:
                raise
            # The server may have taken the message and its answer may be lost.
            raise InDoubt(f"{host} went away while it took the message: {error}") from error
        # Accepted: whatever the server says to a goodbye, the message is on its way.
        with suppress(smtplib.SMTPException, OSError):
            smtp.quit()


def connected(host: str, port: int) -> smtplib.SMTP:
    if port == smtplib.SMTP_SSL_PORT:
        return smtplib.SMTP_SSL(host, port, timeout=TIMEOUT, context=ssl.create_default_context())
    return smtplib.SMTP(host, port, timeout=TIMEOUT)


def answer(error: smtplib.SMTPResponseException | smtplib.SMTPRecipientsRefused) -> tuple[int, str]:
    """The server's code and words."""
    words: bytes | str
    if isinstance(error, smtplib.SMTPRecipientsRefused):
        code, words = next(iter(error.recipients.values()))  # there is one recipient only
    else:
        code, words = error.smtp_code, error.smtp_error
    return code, words.decode(errors="replace") if isinstance(words, bytes) else words
