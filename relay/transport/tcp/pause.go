package tcp

import (
	"errors"
	"net"
	"os"
	"time"
)

// second is for how many parts of its deadline a read that met it looks once more.
const second = 100

// readPatient reads what has come, or comes within a time. That the time is over says
// nothing by itself: this process may have had no processor for as long, or its machine been
// stopped, and what came meanwhile lies in the socket, which a read behind its deadline does
// not look at. So one that is behind it looks once more.
func readPatient(c net.Conn, b []byte, limit time.Duration) (int, error) {
	n, err := c.Read(b)
	if n > 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
		return n, err
	}
	if again := c.SetReadDeadline(time.Now().Add(limit / second)); again != nil {
		return 0, err
	}
	return c.Read(b)
}
