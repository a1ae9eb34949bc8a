"""Django's settings, derived from `penstock.config`: there is one of them, for every environment."""

import os
import secrets
import tempfile
from pathlib import Path
from typing import Any

import django_stubs_ext
from django.utils.translation import gettext_lazy as _
from psycopg.conninfo import conninfo_to_dict

from penstock.config import config

django_stubs_ext.monkeypatch()

CONFIG = config()
ROOT = Path(__file__).resolve().parents[2]
PENSTOCK_HOME = CONFIG.home
KEYS_DIR = PENSTOCK_HOME / "keys"
BLOBS_DIR = PENSTOCK_HOME / "blobs"
MODELS_DIR = PENSTOCK_HOME / "models"


def secret(name: str) -> str:
    """A secret kept in the keys folder, made on first use, readable by its owner alone."""
    path = KEYS_DIR / name
    try:
        return path.read_text()
    except FileNotFoundError:
        KEYS_DIR.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, aside = tempfile.mkstemp(dir=KEYS_DIR)  # mkstemp creates it with mode 0600
        with os.fdopen(handle, "w") as stream:
            stream.write(secrets.token_urlsafe(48))
        try:
            os.link(aside, path)  # the first process wins, the others read what it wrote
        except FileExistsError:
            pass
        finally:
            os.unlink(aside)
        return path.read_text()


SECRET_KEY = secret("web-secret")
INTERNAL_TOKEN_FILE = KEYS_DIR / "internal-token"
DEBUG = CONFIG.debug
ALLOWED_HOSTS = [*CONFIG.allowed_hosts.split(","), CONFIG.host]
CSRF_TRUSTED_ORIGINS = [CONFIG.public_url] if CONFIG.public_url else []
_https = CONFIG.public_url.startswith("https://")
SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = _https
SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https") if _https else None
SECURE_HSTS_SECONDS = 31_536_000 if _https else 0
SECURE_CONTENT_TYPE_NOSNIFF = True
SECURE_REFERRER_POLICY = "same-origin"
X_FRAME_OPTIONS = "DENY"
CSRF_FAILURE_VIEW = "penstock.dashboard.views.frame.csrf_failure"
SESSION_COOKIE_HTTPONLY = True
SESSION_COOKIE_SAMESITE = "Lax"
SESSION_COOKIE_NAME = f"penstock_session_{CONFIG.port}"
CSRF_COOKIE_NAME = f"penstock_csrf_{CONFIG.port}"

INSTALLED_APPS = [
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django.contrib.humanize",
    "django.contrib.postgres",
    "csp",
    "django_htmx",
    "pgtrigger",
    "rest_framework",
    "drf_spectacular",
    "drf_spectacular_sidecar",
    "governance",
    "penstock.accounts",
    "penstock.registry",
    "penstock.serving",
    "penstock.telemetry",
    "penstock.pilots",
    "penstock.openai_api",
    "penstock.rest_api",
    "penstock.dashboard",
]

# All of them run on the event loop. One that is only synchronous would make Django run asynchronous views, streamed
# answers among them, on a second loop that ends before the stream does.
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "servestatic.middleware.ServeStaticMiddleware",
    "csp.middleware.CSPMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.locale.LocaleMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "django_htmx.middleware.HtmxMiddleware",
]

ROOT_URLCONF = "penstock.urls"
ASGI_APPLICATION = "penstock.asgi.application"
APPEND_SLASH = True

TEMPLATES: list[dict[str, Any]] = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [ROOT / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.template.context_processors.i18n",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
                "penstock.dashboard.context.page",
            ],
        },
    },
]

_database = conninfo_to_dict(CONFIG.resolved_database_url())
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": _database.get("dbname") or "penstock",
        "USER": _database.get("user") or "",
        "PASSWORD": _database.get("password") or "",
        "HOST": _database.get("host") or "",
        "PORT": str(_database.get("port") or ""),
        "CONN_MAX_AGE": 0,
        "CONN_HEALTH_CHECKS": True,
        "OPTIONS": {
            key: value for key, value in _database.items() if key not in {"dbname", "user", "password", "host", "port"}
        },
    },
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
MIGRATION_MODULES: dict[str, str] = {}

AUTH_USER_MODEL = "accounts.User"
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.UserAttributeSimilarityValidator"},
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator", "OPTIONS": {"min_length": 12}},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
]
LOGIN_URL = "dashboard:sign-in"
LOGIN_REDIRECT_URL = "dashboard:overview"
LOGOUT_REDIRECT_URL = "dashboard:sign-in"

LANGUAGE_CODE = CONFIG.language
LANGUAGES = [("en", _("English")), ("zh-hant", _("Traditional Chinese"))]
LOCALE_PATHS = [ROOT / "locale"]
LANGUAGE_COOKIE_NAME = "penstock_language"
USE_I18N = True
USE_TZ = True
TIME_ZONE = "UTC"

STATIC_URL = "static/"
STATIC_ROOT = PENSTOCK_HOME / "static"
STATICFILES_DIRS: list[Path] = []
STATICFILES_FINDERS = [
    "django.contrib.staticfiles.finders.AppDirectoriesFinder",
    "penstock.dashboard.finders.PlotlyFinder",
]
STORAGES = {
    "default": {"BACKEND": "django.core.files.storage.FileSystemStorage"},
    "staticfiles": {"BACKEND": "servestatic.storage.CompressedManifestStaticFilesStorage"},
}
SERVESTATIC_USE_FINDERS = DEBUG

CONTENT_SECURITY_POLICY = {
    "DIRECTIVES": {
        "default-src": ["'self'"],
        "img-src": ["'self'", "data:", "blob:"],
        # Plotly writes its own style attributes; scripts come from our own files alone.
        "style-src": ["'self'", "'unsafe-inline'"],
        "script-src": ["'self'"],
        "object-src": ["'none'"],
        "frame-ancestors": ["'none'"],
        "base-uri": ["'none'"],
        "form-action": ["'self'"],
    },
}

REST_FRAMEWORK = {
    "DEFAULT_SCHEMA_CLASS": "drf_spectacular.openapi.AutoSchema",
    "DEFAULT_AUTHENTICATION_CLASSES": [
        "penstock.accounts.authentication.ApiKeyAuthentication",
        "rest_framework.authentication.SessionAuthentication",
    ],
    "DEFAULT_PERMISSION_CLASSES": ["rest_framework.permissions.IsAuthenticated"],
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "DEFAULT_PAGINATION_CLASS": "rest_framework.pagination.CursorPagination",
    "PAGE_SIZE": 50,
    "UNAUTHENTICATED_USER": "django.contrib.auth.models.AnonymousUser",
}
SPECTACULAR_SETTINGS = {
    "TITLE": "Penstock API",
    "VERSION": "1",
    "DESCRIPTION": "Tasks, model releases, batches, requests, measurements and evidence.",
    "OAS_VERSION": "3.1.1",
    "SERVE_INCLUDE_SCHEMA": False,
    "SWAGGER_UI_DIST": "SIDECAR",
    "SWAGGER_UI_FAVICON_HREF": "SIDECAR",
    "ENUM_NAME_OVERRIDES": {
        "TaskStatus": "penstock.registry.models.Task.Status",
        "ReleaseStatus": "penstock.registry.models.ModelRelease.Status",
        "BatchStatus": "penstock.serving.models.Batch.Status",
        "RequestStatus": "penstock.serving.models.Request.Status",
        "PilotStatus": "penstock.pilots.models.Pilot.Status",
    },
}

LEDGER_KEY_DIR = KEYS_DIR / "ledger"
LEDGER_ORIGIN = CONFIG.ledger_origin

DATA_UPLOAD_MAX_MEMORY_SIZE = 16 * 1024 * 1024
FILE_UPLOAD_MAX_MEMORY_SIZE = 1024 * 1024

CELERY_BROKER_URL = CONFIG.resolved_broker_url() or "redis://127.0.0.1:6379/0"

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s"}},
    "handlers": {"console": {"class": "logging.StreamHandler", "formatter": "line"}},
    "root": {"handlers": ["console"], "level": "INFO"},
    "loggers": {"httpx": {"level": "WARNING"}, "fontTools": {"level": "WARNING"}},
}
