// Command install makes the container engines that `make test-engines` runs and
// that are no packages of this Debian, in the user's cache directory. It runs in
// the folder of package engines.
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
