"""/v1. No address ends in a slash; each is written out."""

from django.urls import URLPattern, URLResolver, path

from penstock.openai_api import batches, catalog, completions, files
from penstock.openai_api.door import door, live_door, nothing_here

urlpatterns: list[URLPattern | URLResolver] = [
    path("files", door(GET=files.index, POST=files.create)),
    path("files/<str:file_id>", door(GET=files.retrieve, DELETE=files.delete)),
    path("files/<str:file_id>/content", door(GET=files.content)),
    path("batches", door(GET=batches.index, POST=batches.create)),
    path("batches/<str:batch_id>", door(GET=batches.retrieve)),
    path("batches/<str:batch_id>/cancel", door(POST=batches.cancel)),
    path("models", door(GET=catalog.index)),
    path("models/<str:name>", door(GET=catalog.retrieve)),
    path("chat/completions", live_door(completions.chat)),
    path("completions", live_door(completions.complete)),
    path("embeddings", live_door(completions.embed)),
    path("", nothing_here),
    path("<path:rest>", nothing_here),
]
