// Command run runs tests and shells in virtual machines.
//
//	go run ./integration/vm/run image small full     make the images
//	go run ./integration/vm/run test                 every case that has a place in a machine
//	go run ./integration/vm/run test --place vm-small ./hook --run TestContainerReachesRelay
//	go run ./integration/vm/run shell --image full
//
// Run exits with 1 if tests failed, which the events report, and with 2 after any other error.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/peerlane/peerlane/integration/vm"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	// A second signal kills the process.
	context.AfterFunc(ctx, stop)
	root := &cobra.Command{
		Use:           "run",
		Short:         "Run tests and shells in virtual machines",
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.AddCommand(imageCommand(), testCommand(), shellCommand())
	if err := root.ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "vm:", err)
		if errors.Is(err, errTests) {
			os.Exit(1)
		}
		os.Exit(2)
	}
}

var began = time.Now()

// logf prints the current step and the elapsed time on standard error.
func logf(format string, arguments ...any) {
	fmt.Fprintf(os.Stderr, "vm: [%5.1f s] "+format+"\n", append([]any{time.Since(began).Seconds()}, arguments...)...)
}

func imageCommand() *cobra.Command {
	return &cobra.Command{
		Use:       "image [small] [full]",
		Short:     "Make missing images",
		ValidArgs: []string{vm.Small, vm.Full},
		Args:      cobra.OnlyValidArgs,
		RunE: func(cmd *cobra.Command, kinds []string) error {
			if len(kinds) == 0 {
				kinds = []string{vm.Small, vm.Full}
			}
			for _, kind := range kinds {
				image, err := images(cmd.Context(), kind)
				if err != nil {
					return err
				}
				logf("%s image: %s", kind, image.Disk)
			}
			return nil
		},
	}
}
