"""Signing in, the theme, and pages for what went wrong."""

from typing import Any

from django.contrib.auth.views import LoginView, LogoutView
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.http.response import HttpResponseBase
from django.shortcuts import redirect
from django.template.loader import render_to_string
from django.utils.functional import Promise
from django.utils.http import url_has_allowed_host_and_scheme
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views.decorators.http import require_POST

from penstock.accounts.models import User
from penstock.dashboard.context import THEME_COOKIE, THEMES

ONE_YEAR_SECONDS = 365 * 24 * 3600


class SignIn(LoginView):
    template_name = "dashboard/sign_in.html"
    redirect_authenticated_user = True

    def get_form(self, form_class: Any = None) -> Any:
        form = super().get_form(form_class)
        form.label_suffix = ""
        return form

    def form_valid(self, form: Any) -> HttpResponse:
        """A person's own language comes with them, unless this browser has chosen one."""
        from django.conf import settings

        response = super().form_valid(form)
        user = self.request.user
        cookie = settings.LANGUAGE_COOKIE_NAME
        if isinstance(user, User) and user.language and cookie not in self.request.COOKIES:
            response.set_cookie(cookie, user.language, samesite="Lax")
        return response


class SignOut(LogoutView):
    http_method_names = ["post", "options"]


@require_POST
def theme(request: HttpRequest) -> HttpResponse:
    """Keeps the chosen theme in a cookie, so that the page comes in it from its first byte."""
    target = request.POST.get("next", "/")
    if not url_has_allowed_host_and_scheme(
        target, allowed_hosts={request.get_host()}, require_https=request.is_secure()
    ):
        target = "/"
    response = redirect(target)
    chosen = request.POST.get("theme", "auto")
    if chosen in THEMES:
        response.set_cookie(THEME_COOKIE, chosen, max_age=ONE_YEAR_SECONDS, samesite="Lax", secure=request.is_secure())
    return response


ERRORS: dict[int, tuple[Promise, Promise, str, str]] = {
    400: (
        gettext_lazy("This request could not be read"),
        gettext_lazy("Something in the address or the form was not as it should be. Nothing was changed."),
        "invalid_request_error",
        "bad_request",
    ),
    403: (
        gettext_lazy("This is not yours to do"),
        gettext_lazy("Your roles do not allow it. Nothing was changed."),
        "permission_error",
        "forbidden",
    ),
    404: (
        gettext_lazy("There is no such page"),
        gettext_lazy("It does not exist, or it belongs to a team that you are not in."),
        "invalid_request_error",
        "not_found",
    ),
    500: (
        gettext_lazy("Something went wrong here"),
        gettext_lazy("The error is in the server's log, with its time. What was recorded before it stays recorded."),
        "server_error",
        "internal_error",
    ),
}


def error_page(request: HttpRequest, status: int, detail: str = "") -> HttpResponseBase:
    """A page for people; OpenAI's envelope for programs, whose addresses begin with /v1/ or /api/."""
    heading, explanation, kind, code = ERRORS[status]
    if request.path.startswith(("/v1/", "/api/")):
        message = detail or str(heading)
        return JsonResponse({"error": {"message": message, "type": kind, "param": None, "code": code}}, status=status)
    context = {"status": status, "heading": heading, "explanation": explanation, "detail": detail}
    # After an error of the server nothing that may fail again is touched: no session, no database.
    page = render_to_string("dashboard/error.html", context, request=request if status != 500 else None)
    return HttpResponse(page, status=status)


def bad_request(request: HttpRequest, exception: Exception | None = None) -> HttpResponseBase:
    return error_page(request, 400)


def forbidden(request: HttpRequest, exception: Exception | None = None) -> HttpResponseBase:
    return error_page(request, 403, str(exception or ""))


def not_found(request: HttpRequest, exception: Exception | None = None) -> HttpResponseBase:
    return error_page(request, 404)


def server_error(request: HttpRequest) -> HttpResponseBase:
    return error_page(request, 500)


def csrf_failure(request: HttpRequest, reason: str = "") -> HttpResponseBase:
    return error_page(
        request,
        403,
        _("The form had expired, or cookies are blocked for this site. Go back, reload, and send it again."),
    )
