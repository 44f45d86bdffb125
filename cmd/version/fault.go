package version

import (
	"fmt"
	"os"
)

// fault is the error of a panic, which is a defect of Peerlane.
type fault struct{ what any }

func (f fault) Error() string {
	return fmt.Sprintf(
		"this is a bug in Peerlane %s: %v; please report it, with the output of the same command with "+
			"GOTRACEBACK=all in its environment", Get().Version, f.what)
}

// Sentence calls do and converts a panic to a fault, so that users see no stack trace. With
// GOTRACEBACK in the environment it does not recover.
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
