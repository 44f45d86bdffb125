// Command install installs the container engines of `make test-engines` that this Debian does not
// package, in the user's cache directory. The working directory is the folder of package engines.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/peerlane/peerlane/integration/engines"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := engines.Install(ctx, func(format string, arguments ...any) {
		fmt.Printf(format+"\n", arguments...)
	}); err != nil {
		fmt.Fprintln(os.Stderr, "installing container engines:", err)
		os.Exit(1)
	}
}
