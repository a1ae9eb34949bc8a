"""/api/batches and /api/requests: to read. /v1 submits and cancels."""

from typing import Any, TypeVar

from django.db.models import Model, QuerySet
from django.utils.translation import gettext as _
from drf_spectacular.utils import OpenApiParameter, extend_schema, extend_schema_view
from rest_framework import mixins
from rest_framework.decorators import action
from rest_framework.exceptions import ValidationError
from rest_framework.request import Request as ApiRequest
from rest_framework.response import Response
from rest_framework.serializers import BaseSerializer
from rest_framework.viewsets import GenericViewSet

from penstock.rest_api.access import NewestFirst, Scoped
from penstock.rest_api.measurements import Measurements, measure
from penstock.rest_api.serializers import (
    BatchDetailSerializer,
    BatchSerializer,
    RequestDetailSerializer,
    RequestSerializer,
)
from penstock.serving.models import Batch, Request
from penstock.serving.selectors import batches_visible_to, requests_visible_to

R = TypeVar("R", bound=Model)

TASK = OpenApiParameter("task", str, description="The name of a task.")


class RowsInOrder(NewestFirst):
    """A batch's requests in the order of its lines; requests at large newest first."""

    def get_ordering(self, request: ApiRequest, queryset: QuerySet[Any], view: Any) -> tuple[str, ...]:
        return ("line",) if request.query_params.get("batch") else ("-created_at", "-pk")


@extend_schema_view(
    list=extend_schema(parameters=[TASK, OpenApiParameter("status", str, enum=Batch.Status.values)]),
)
class BatchViews(Scoped, mixins.ListModelMixin, mixins.RetrieveModelMixin, GenericViewSet[Batch]):
    """Batches of your teams."""

    queryset = Batch.objects.none()
    serializer_class = BatchSerializer
    pagination_class = NewestFirst

    def get_queryset(self) -> QuerySet[Batch]:
        return filtered(self.scoped(batches_visible_to(self.request.user)), self.request, Batch.Status.values)

    def get_serializer_class(self) -> type[BaseSerializer[Batch]]:
        return BatchDetailSerializer if self.action == "retrieve" else BatchSerializer

    @extend_schema(responses=Measurements)
    @action(detail=True, pagination_class=None)
    def measurements(self, request: ApiRequest, pk: str) -> Response:
        """Figures of all of the batch's requests, and its task's objectives held against them."""
        batch = self.get_object()
        return Response(measure(batch.task, requests_visible_to(self.person).filter(batch=batch), per="wall"))


@extend_schema_view(
    list=extend_schema(
        parameters=[
            TASK,
            OpenApiParameter("status", str, enum=Request.Status.values),
            OpenApiParameter("batch", str, description="The identifier of a batch; its requests come in line order."),
        ]
    ),
)
class RequestViews(Scoped, mixins.ListModelMixin, mixins.RetrieveModelMixin, GenericViewSet[Request]):
    """Requests of your teams. The list leaves prompts and outputs out."""

    queryset = Request.objects.none()
    serializer_class = RequestSerializer
    pagination_class = RowsInOrder

    def get_queryset(self) -> QuerySet[Request]:
        rows = filtered(self.scoped(requests_visible_to(self.request.user)), self.request, Request.Status.values)
        batch = self.request.query_params.get("batch")
        return rows.filter(batch_id=batch) if batch else rows

    def get_serializer_class(self) -> type[BaseSerializer[Request]]:
        return RequestDetailSerializer if self.action == "retrieve" else RequestSerializer


def filtered(rows: QuerySet[R], request: ApiRequest, statuses: list[str]) -> QuerySet[R]:
    """Rows of the task and the status that the query names. Raises DRF's ValidationError for an unknown status."""
    task, status = request.query_params.get("task"), request.query_params.get("status")
    if task:
        rows = rows.filter(task__name=task)
    if status:
        if status not in statuses:
            known = ", ".join(statuses)
            raise ValidationError({"status": [_("Unknown; use one of: %(known)s.") % {"known": known}]})
        rows = rows.filter(status=status)
    return rows
