"""The tables of checks. A new check is a function in a file of its own, and one line here."""

from regard.doctor.case import TextCheck, has_examples, is_labelled, is_pairs, is_translation
from regard.doctor.checks.alignment import alignment
from regard.doctor.checks.amount import amount
from regard.doctor.checks.copies import copies
from regard.doctor.checks.duplicates import duplicates, many_targets
from regard.doctor.checks.empty import empty
from regard.doctor.checks.encoding import encoding
from regard.doctor.checks.labels import labels
from regard.doctor.checks.language import language
from regard.doctor.checks.lengths import lengths, ratios
from regard.doctor.checks.malformed import malformed
from regard.doctor.checks.markup import controls, markup, mojibake
from regard.doctor.checks.overlap import overlap
from regard.doctor.checks.swapped import swapped
from regard.doctor.checks.unseen import unseen
from regard.doctor.run_record import Symptom
from regard.doctor.symptoms.checkpoints import damaged_checkpoints
from regard.doctor.symptoms.divergence import divergence, gradients
from regard.doctor.symptoms.fitting import fitting
from regard.doctor.symptoms.learning_rate import learning_rate
from regard.doctor.symptoms.memory import split_batches
from regard.doctor.symptoms.outputs import collapse, copying, endings, source_use
from regard.doctor.symptoms.scores import ending, leak, worse_than_baseline

TEXT_CHECKS = (
    TextCheck("encoding", encoding),
    TextCheck("format", malformed),
    TextCheck("alignment", alignment, is_translation),
    TextCheck("exchanged sides", swapped, is_translation),
    TextCheck("language", language),
    TextCheck("empty lines", empty, has_examples),
    TextCheck("duplicates", duplicates, has_examples),
    TextCheck("many targets", many_targets, is_pairs),
    TextCheck("overlap", overlap),
    TextCheck("copies", copies, is_translation),
    TextCheck("lengths", lengths, has_examples),
    TextCheck("length ratios", ratios, is_translation, unless="alignment"),
    TextCheck("markup", markup),
    TextCheck("wrong decoding", mojibake),
    TextCheck("control characters", controls),
    TextCheck("unseen text", unseen),
    TextCheck("labels", labels, is_labelled),
    TextCheck("amount", amount),
)

SYMPTOMS = (
    Symptom("divergence", divergence),
    Symptom("learning rate", learning_rate),
    Symptom("gradients", gradients),
    Symptom("outputs", collapse),
    Symptom("copies", copying),
    Symptom("use of the source", source_use),
    Symptom("validation text", leak),
    Symptom("baselines", worse_than_baseline),
    Symptom("endings", endings),
    Symptom("fitting", fitting),
    Symptom("memory", split_batches),
    Symptom("checkpoints", damaged_checkpoints),
    Symptom("ending", ending),
)

# Checks of the training text of a run that explain symptoms of the run.
CAUSES = ("alignment", "copies", "many targets", "exchanged sides", "labels")
