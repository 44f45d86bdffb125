package version

import (
	"fmt"
	"os"
)

// fault is a mistake in Peerlane itself.
type fault struct{ what any }

func (f fault) Error() string {
	return fmt.Sprintf(
		"this is a fault of Peerlane %s itself: %v; please report it, with what the same command prints with "+
			"GOTRACEBACK=all in its environment", Get().Version, f.what)
}

// Sentence calls do, and returns a panic as an error, a Fault: a user gets no stack trace. With
// GOTRACEBACK in the environment the panic goes on.
func Sentence(do func() error) (err error) {
	if os.Getenv("GOTRACEBACK") == "" {
		defer func() {
			if what := recover(); what != nil {
				err = fault{what}
			}
		}()
	}
	return do()
}
