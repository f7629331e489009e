"""LibreTranslate's interface for translation models."""

from fastapi import APIRouter

router = APIRouter(tags=["LibreTranslate"])
