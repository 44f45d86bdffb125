package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/exporter-toolkit/web"
	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/cmd/peerlane/exporter"
	"github.com/peerlane/peerlane/hook"
)

// exporterAddress is where the exporter listens unless told otherwise: what containers
// do is nobody's business on the network before somebody says so.
const exporterAddress = "127.0.0.1:9836"

func newExporterCommand(a *app) *cobra.Command {
	var addresses []string
	var webConfig string
	var once bool
	cmd := &cobra.Command{
		Use:   "exporter",
		Short: "Give the figures of relays to Prometheus",
		Long: `Give the figures of this host's relays to Prometheus, at /metrics: for each container
and lane bytes, operations, how long they took, what they wait for and what failed, the
staging memory of each relay, and how many relays are in which state. docs/metrics.md
has all of them. Relays are asked whenever it is scraped, and nothing runs between.

It listens on loopback, unless --listen says otherwise. --web-config is a file of
Prometheus' exporter-toolkit, by which it speaks TLS and asks for a password: needed
where others can reach the address, for the names of containers are in the metrics.`,
		Example: `  peerlane exporter
  peerlane exporter --listen :9836 --web-config /etc/peerlane/web.yaml
  peerlane exporter --once | promtool check metrics`,
		Args: noArgs,
	}
	flags := cmd.Flags()
	flags.StringArrayVar(&addresses, "listen", []string{exporterAddress}, "listen at `ADDRESS:PORT`; may be given more than once")
	flags.StringVar(&webConfig, "web-config", "", "take TLS and passwords from `FILE`, the exporter-toolkit's web configuration")
	flags.BoolVar(&once, "once", false, "print the metrics once, and end")
	completeFiles(cmd, "web-config", "yaml", "yml")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if once && (flags.Changed("listen") || flags.Changed("web-config")) {
			return usageError{cmd.CommandPath(), errors.New("--once prints and does not listen: give it without --listen and --web-config")}
		}
		// What cannot be read now will not be later.
		if _, err := hook.List(a.layout); err != nil {
			return asRoot(err)
		}
		registry := prometheus.NewRegistry()
		registry.MustRegister(exporter.New(a.layout, func(err error) { a.log.WithError(err).Warn("reading the state of relays") }))
		if once {
			return a.printMetrics(registry)
		}
		if err := web.Validate(webConfig); err != nil {
			return fmt.Errorf("--web-config %s: %w", webConfig, err)
		}
		ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, unix.SIGTERM)
		defer stop()
		return a.export(ctx, registry, addresses, webConfig)
	}
	return cmd
}

// printMetrics prints all of them in Prometheus' text form.
func (a *app) printMetrics(g prometheus.Gatherer) error {
	families, err := g.Gather()
	if err != nil {
		return err
	}
	for _, f := range families {
		if _, err := expfmt.MetricFamilyToText(a.out, f); err != nil {
			return err
		}
	}
	return nil
}

// export serves metrics until the context ends.
func (a *app) export(ctx context.Context, g prometheus.Gatherer, addresses []string, webConfig string) error {
	var listeners []net.Listener
	for _, address := range addresses {
		l, err := net.Listen("tcp", address)
		if err != nil {
			for _, l := range listeners {
				l.Close()
			}
			return fmt.Errorf("listening at %s: %w", address, err)
		}
		listeners = append(listeners, l)
		if ip := l.Addr().(*net.TCPAddr).IP; !ip.IsLoopback() && webConfig == "" {
			a.log.Warnf("everybody who reaches %s sees the names of containers and what they move; --web-config has TLS and passwords", l.Addr())
		}
		a.log.Infof("metrics are at %s/metrics", l.Addr())
	}
	handler := http.NewServeMux()
	handler.Handle("GET /metrics", promhttp.HandlerFor(g, promhttp.HandlerOpts{
		MaxRequestsInFlight: 4, // each asks all relays
		Timeout:             time.Minute,
	}))
	server := &http.Server{Handler: handler, ReadHeaderTimeout: 10 * time.Second}
	// A scrape that is under way gets its answer.
	ended := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(ended)
		late, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		_ = server.Shutdown(late) // who is later than that has lost its answer
	})
	systemd := false
	err := web.ServeMultiple(listeners, server, &web.FlagConfig{WebListenAddresses: &addresses, WebSystemdSocket: &systemd, WebConfigFile: &webConfig},
		slog.New(slog.NewTextHandler(a.errOut, &slog.HandlerOptions{Level: slog.LevelWarn})))
	if !stop() {
		<-ended
	}
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}
