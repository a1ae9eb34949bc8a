"""/api/rate-card and /api/pilots"""

from django.db.models import QuerySet
from drf_spectacular.utils import extend_schema
from rest_framework import mixins
from rest_framework.request import Request as ApiRequest
from rest_framework.response import Response
from rest_framework.viewsets import GenericViewSet

from penstock.pilots.models import Pilot
from penstock.pilots.selectors import pilots_visible_to
from penstock.rest_api.access import NewestFirst, Scoped
from penstock.rest_api.serializers import PilotSerializer, RateCardSerializer
from penstock.telemetry.models import RateCard
from penstock.telemetry.rates import current_rate_card, set_rate_card


class RateCardView(Scoped):
    """What an hour of the host costs. Installation-wide: whoever is signed in may read it."""

    queryset = RateCard.objects.none()
    serializer_class = RateCardSerializer

    @extend_schema(operation_id="rate_card_retrieve")
    def get(self, request: ApiRequest) -> Response:
        """The card in force."""
        return Response(self.get_serializer(current_rate_card()).data)

    def put(self, request: ApiRequest) -> Response:
        """Puts a new card in force; figures reckoned before keep the rates of their own card."""
        given = self.get_serializer(data=request.data)
        given.is_valid(raise_exception=True)
        return Response(self.get_serializer(set_rate_card(user=self.person, **given.validated_data)).data)


class PilotViews(Scoped, mixins.ListModelMixin, mixins.RetrieveModelMixin, GenericViewSet[Pilot]):
    """Pilots of your teams."""

    queryset = Pilot.objects.none()
    serializer_class = PilotSerializer
    pagination_class = NewestFirst
    lookup_field = "name"

    def get_queryset(self) -> QuerySet[Pilot]:
        return self.scoped(pilots_visible_to(self.request.user), team="task__team")
