"""OpenAI's interface for language models."""

from fastapi import APIRouter

router = APIRouter(prefix="/v1", tags=["OpenAI"])
