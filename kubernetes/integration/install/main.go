// Command install builds the programs of the clusters of `make test-cluster` in the user's cache
// directory. The working directory is the folder of package integration.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/peerlane/peerlane/kubernetes/integration"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	begun := time.Now()
	if err := integration.Install(ctx, func(format string, arguments ...any) {
		fmt.Printf(format+"\n", arguments...)
	}); err != nil {
		fmt.Fprintln(os.Stderr, "building Kubernetes:", err)
		os.Exit(1)
	}
	fmt.Printf("Kubernetes is ready after %v\n", time.Since(begun).Round(time.Second))
}
