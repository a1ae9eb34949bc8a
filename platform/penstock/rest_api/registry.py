"""/api/tasks and /api/releases"""

from collections.abc import Callable
from typing import Any

from django.db.models import QuerySet
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import mixins, status
from rest_framework.decorators import action
from rest_framework.request import Request as ApiRequest
from rest_framework.response import Response
from rest_framework.viewsets import GenericViewSet

from penstock.registry.models import ModelRelease, Task
from penstock.registry.selectors import releases_visible_to, task_versions_visible_to, tasks_visible_to
from penstock.registry.services import (
    activate_task,
    approve_release,
    create_task,
    retire_task,
    submit_task,
    suspend_task,
    update_task,
    withdraw_release,
)
from penstock.rest_api.access import ByName, Scoped
from penstock.rest_api.measurements import WINDOW, Measurements, measure, window_days
from penstock.rest_api.serializers import (
    ReasonSerializer,
    ReleaseSerializer,
    TaskSerializer,
    TaskUpdateSerializer,
    TaskVersionSerializer,
)
from penstock.serving.selectors import requests_visible_to

NAME = OpenApiParameter("name", str, OpenApiParameter.PATH)


class TaskViews(Scoped, mixins.ListModelMixin, mixins.RetrieveModelMixin, GenericViewSet[Task]):
    """Registered uses of AI."""

    queryset = Task.objects.none()
    serializer_class = TaskSerializer
    pagination_class = ByName
    lookup_field = "name"

    def get_queryset(self) -> QuerySet[Task]:
        return self.scoped(tasks_visible_to(self.request.user))

    def create(self, request: ApiRequest) -> Response:
        """Registers a task as a draft. An operator or task owner of the team may."""
        given = self.get_serializer(data=request.data)
        given.is_valid(raise_exception=True)
        self.may_act_for(given.validated_data["team"])
        task = create_task(user=self.person, **given.validated_data)
        return Response(self.get_serializer(task).data, status=status.HTTP_201_CREATED)

    @extend_schema(request=TaskUpdateSerializer, responses=TaskSerializer)
    def partial_update(self, request: ApiRequest, name: str) -> Response:
        """Changes what a task says, as a new version. Of an active task an operator may adjust title, objectives,
        fairness plan, budget and retention; the rest takes an approver."""
        task = self.get_object()
        given = TaskUpdateSerializer(task, data=request.data, partial=True, context=self.get_serializer_context())
        given.is_valid(raise_exception=True)
        return Response(self.get_serializer(update_task(user=self.person, task=task, **given.validated_data)).data)

    @extend_schema(request=ReasonSerializer, responses=TaskSerializer)
    @action(detail=True, methods=["post"])
    def submit(self, request: ApiRequest, name: str) -> Response:
        """Asks an approver to activate a draft."""
        return self._move(request, submit_task)

    @extend_schema(request=ReasonSerializer, responses=TaskSerializer)
    @action(detail=True, methods=["post"])
    def activate(self, request: ApiRequest, name: str) -> Response:
        """Lets a submitted or suspended task run. An approver may."""
        return self._move(request, activate_task)

    @extend_schema(request=ReasonSerializer, responses=TaskSerializer)
    @action(detail=True, methods=["post"])
    def suspend(self, request: ApiRequest, name: str) -> Response:
        """Stops an active task from taking requests."""
        return self._move(request, suspend_task)

    @extend_schema(request=ReasonSerializer, responses=TaskSerializer)
    @action(detail=True, methods=["post"])
    def retire(self, request: ApiRequest, name: str) -> Response:
        """Ends a task for good; its records stay."""
        return self._move(request, retire_task)

    @extend_schema(responses=TaskVersionSerializer(many=True))
    @action(detail=True, pagination_class=None)
    def versions(self, request: ApiRequest, name: str) -> Response:
        """What the task said at each version, the newest first."""
        rows = task_versions_visible_to(self.person).filter(task=self.get_object()).order_by("-version")
        return Response(TaskVersionSerializer(rows, many=True).data)

    @extend_schema(parameters=[WINDOW], responses=Measurements)
    @action(detail=True, pagination_class=None)
    def measurements(self, request: ApiRequest, name: str) -> Response:
        """Figures of the requests that the task finished lately, and its objectives held against them."""
        task = self.get_object()
        return Response(
            measure(task, requests_visible_to(self.person).filter(task=task), days=window_days(request), per="active")
        )

    def _move(self, request: ApiRequest, service: Callable[..., Task]) -> Response:
        given = ReasonSerializer(data=request.data)
        given.is_valid(raise_exception=True)
        task = service(user=self.person, task=self.get_object(), reason=given.validated_data["reason"])
        return Response(self.get_serializer(task).data)


class ReleaseViews(Scoped, mixins.ListModelMixin, mixins.RetrieveModelMixin, GenericViewSet[ModelRelease]):
    """Model releases of the installation."""

    queryset = ModelRelease.objects.none()
    serializer_class = ReleaseSerializer
    pagination_class = ByName
    lookup_field = "name"

    def get_queryset(self) -> QuerySet[ModelRelease]:
        return releases_visible_to(self.request.user).prefetch_related("evaluations")

    @extend_schema(request=None)
    @action(detail=True, methods=["post"])
    def approve(self, request: ApiRequest, name: str) -> Response:
        """Lets tasks run on the release. An approver may."""
        return self._move(approve_release)

    @extend_schema(request=None)
    @action(detail=True, methods=["post"])
    def withdraw(self, request: ApiRequest, name: str) -> Response:
        """Ends the use of the release for good. An approver may."""
        return self._move(withdraw_release)

    def _move(self, service: Callable[..., Any]) -> Response:
        return Response(self.get_serializer(service(user=self.person, release=self.get_object())).data)
