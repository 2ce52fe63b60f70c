"""The admin key: who may try how often, and what an answer tells."""

from __future__ import annotations

import pytest

from gateway.admin.key_paths import ADDRESSES, ATTEMPTS, AdminKey
from gateway.api.api_error import ApiError

KEY = "the admin key of a test"
RIGHT = {"authorization": f"Bearer {KEY}"}
WRONG = {"authorization": "Bearer another key of 20"}


class Watch:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self.key = AdminKey(KEY, lambda: self.now)

    def status(self, headers: dict[str, str], address: str = "10.0.0.1") -> int:
        try:
            self.key.check(headers, address)
        except ApiError as error:
            return error.status
        return 200


@pytest.mark.parametrize(
    "headers", [{}, WRONG, {"authorization": KEY}, {"authorization": f"Basic {KEY}"}, {"x-api-key": KEY}]
)
def test_an_absent_and_a_wrong_key_get_the_same_answer(headers: dict[str, str]) -> None:
    """So does a right key in another form: the reply tells the form, and nothing of the key."""
    with pytest.raises(ApiError) as wrong:
        AdminKey(KEY).check(headers, "10.0.0.1")
    assert (wrong.value.status, wrong.value.code) == (401, "invalid_admin_key")
    assert KEY not in wrong.value.body().decode()
    assert wrong.value.message == "This path requires the admin key: authorization: Bearer <server.admin_key>."


def test_guesses_of_one_address_are_six_a_minute() -> None:
    """Beyond, even the right key is refused from there: an answer at once would tell right from wrong."""
    watch = Watch()
    assert [watch.status(WRONG) for _ in range(ATTEMPTS + 2)] == [401] * ATTEMPTS + [429] * 2
    assert (watch.status(RIGHT), watch.status(RIGHT, "10.0.0.2")) == (429, 200)
    watch.now += 60.0 / ATTEMPTS + 0.001
    assert [watch.status(WRONG), watch.status(WRONG)] == [401, 429]
    watch.now += 60.0
    assert [watch.status(RIGHT) for _ in range(20)] == [200] * 20


def test_the_addresses_remembered_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    """The one that failed longest ago is forgotten first; every wrong key has a line in the log, without the key."""
    watch = Watch()
    for _ in range(ATTEMPTS):
        watch.status(WRONG)
    for i in range(ADDRESSES - 1):
        watch.status(WRONG, f"host {i}")
    assert watch.status(RIGHT) == 429
    watch.status(WRONG, "one more")
    assert watch.status(RIGHT) == 200
    assert "a wrong admin key, or none, from one more" in caplog.text
    assert "another key" not in caplog.text
