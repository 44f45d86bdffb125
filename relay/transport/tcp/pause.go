package tcp

import (
	"errors"
	"os"
	"time"
)

// parts is the number of parts of a wait for Config's silence. A passed deadline alone proves
// nothing: this process may have had no processor for as long, or the machine may have been
// stopped, together with the peer's machine. Bytes that arrived meanwhile are in the socket, which
// a read after its deadline does not check, and a stopped peer continues only now. A part counts
// once, however long the part took.
const parts = 4

// second divides the silence for one more try after the last deadline: the last part may have been
// a pause.
const second = 100

// patiently calls move, which transfers bytes to or from a connection, until move succeeds or the
// silence is over. deadline sets the time at which move gives up.
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
