"""Users whom a model with rows of items was not trained on: they are folded in."""

from pathlib import Path
from typing import NamedTuple

from millrace.apps.autoencoder import data
from millrace.apps.autoencoder.data import RatingData
from millrace.apps.autoencoder.item_rows import EncodedItems, fold_in_users
from millrace.apps.autoencoder.predictor import Recommender
from millrace.apps.autoencoder.run_ratings import load_ratings_for
from millrace.config import replace_options
from millrace.data.ratings.matrix import ColumnBiases, Unseen, find_ids


class FoldedIn(NamedTuple):
    """Users of a file with ratings, and what predicts for them."""

    ratings: RatingData
    """Ratings by user, without biases."""
    unknown: Unseen
    """Counts of the known ratings of items that the model does not know."""
    encoded: EncodedItems


def load_new_users(
    recommender: Recommender, training: Path | None, validation: Path | None
) -> FoldedIn | None:
    """Fold in all users of a file, if there are some whom the model was not trained on.

    Args:
        recommender: The model; one that has rows of users needs no folding in.
        training: The ratings to predict from.
        validation: The ratings to predict (default: as in the run).
    """
    if training is None or not recommender.folds_in:
        return None
    own_biases = recommender.column_biases
    assert own_biases is not None, "checked by folds_in"
    by_user = replace_options(recommender.config, rows="users")
    files = recommender.files._replace(column_ids=recommender.item_ids, column_biases=None)
    ratings, unknown = load_ratings_for(
        by_user, files, training=training, validation=validation
    )
    users = ratings.training.user_ids
    if (find_ids(recommender.files.column_ids, users) >= 0).all():
        return None
    encoded, of_item, penalty = recommender.encode_items()
    biases = ColumnBiases(
        own_biases.mean,
        of_item,
        own_biases.strength,
        own_biases.smallest,
        own_biases.largest,
        own_biases.unit,
    )
    ratings = data.subtract_biases(ratings, biases)
    return FoldedIn(ratings, unknown, fold_in_users(encoded, ratings.training, penalty))
