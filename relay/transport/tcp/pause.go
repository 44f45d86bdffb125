package tcp

import (
	"errors"
	"os"
	"time"
)

// parts is in how many parts Config's silence is waited for. That a deadline has passed says
// nothing by itself: this process may have had no processor for as long, or its machine been
// stopped, and the other side's with it. What came meanwhile lies in the socket, which a
// read behind its deadline does not look at; and who was stopped as well goes on only now. So
// however long a part has taken it counts as one.
const parts = 4

// second is for how many parts of the silence who met all deadlines looks once more: the
// last may have been a pause.
const second = 100

// patiently moves something, to a connection or from it, as soon as that can be done within
// a silence. deadline sets when move gives up.
func patiently(silence time.Duration, deadline func(time.Time) error, move func() (int64, error)) (n int64, err error) {
	for part := range parts + 1 {
		limit := silence / parts
		if part == parts {
			limit = silence / second
		}
		if err := deadline(time.Now().Add(limit)); err != nil {
			return 0, err
		}
		n, err = move()
		if n > 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
			break
		}
	}
	return n, err
}
