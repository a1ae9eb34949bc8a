from django.urls import include, path
from django.views.i18n import set_language

urlpatterns = [
    path("v1/", include("penstock.openai_api.urls")),
    path("api/", include("penstock.rest_api.urls")),
    path("language/", set_language, name="set_language"),
    path("", include("penstock.dashboard.urls")),
]

handler400 = "penstock.dashboard.views.frame.bad_request"
handler403 = "penstock.dashboard.views.frame.forbidden"
handler404 = "penstock.dashboard.views.frame.not_found"
handler500 = "penstock.dashboard.views.frame.server_error"
