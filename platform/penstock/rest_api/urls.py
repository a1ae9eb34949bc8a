"""/api"""

from django.urls import URLPattern, URLResolver, include, path
from drf_spectacular.views import SpectacularAPIView, SpectacularSwaggerSplitView
from rest_framework.routers import SimpleRouter

from penstock.rest_api.economics import PilotViews, RateCardView
from penstock.rest_api.registry import ReleaseViews, TaskViews
from penstock.rest_api.serving import BatchViews, RequestViews

router = SimpleRouter()
router.register("tasks", TaskViews, basename="task")
router.register("releases", ReleaseViews, basename="release")
router.register("batches", BatchViews, basename="batch")
router.register("requests", RequestViews, basename="request")
router.register("pilots", PilotViews, basename="pilot")

app_name = "api"
urlpatterns: list[URLPattern | URLResolver] = [
    path("", include(router.urls)),
    path("rate-card/", RateCardView.as_view(), name="rate-card"),
    path("schema/", SpectacularAPIView.as_view(), name="schema"),
    # The split view keeps its script out of the page, which the content security policy asks for.
    path("docs/", SpectacularSwaggerSplitView.as_view(url_name="api:schema"), name="docs"),
]
