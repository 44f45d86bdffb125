package main

import (
	"context"
	"errors"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/sirupsen/logrus"
	"github.com/spf13/cobra"

	"github.com/peerlane/peerlane/cmd/peerlane/exporter"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/kubernetes/health"
)

// conditionsPoll is the time between two observations of the lanes' conditions.
const conditionsPoll = 2 * time.Second

func exporterCommand() *cobra.Command {
	var root, listen string
	c := &cobra.Command{
		Use:   "exporter",
		Short: "Export metrics of the node's relays to Prometheus",
		Long: `exporter serves the metrics of "peerlane exporter", with the ids of containers, to Prometheus;
docs/metrics.md lists each metric. peerlane_lane_condition has the conditions of the node's lanes. A host
with tenancy = "multi" needs exporter.multi_tenancy = true in config.toml.`,
		Example: "  peerlane-kubelet exporter --listen :9836",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			ctx, stop := signal.NotifyContext(c.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			return export(ctx, paths.New(root), listen)
		},
	}
	c.Flags().StringVar(&root, "root", "/", "root of the host: look for var/lib/peerlane and run/peerlane below it")
	c.Flags().StringVar(&listen, "listen", ":9836", "address of the metrics")
	return c
}

// export serves metrics until the context ends.
func export(ctx context.Context, l paths.Layout, listen string) error {
	if err := exporter.CheckTenancy(l); err != nil {
		return err
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(exporter.New(exporter.Host(l), true, func(err error) {
		logrus.WithError(err).Warn("Reading the state of relays failed")
	}))
	conditions := &health.Metrics{}
	registry.MustRegister(conditions)
	go conditions.Run(ctx, health.NewMonitor(l, time.Now), conditionsPoll,
		&health.Failures{Log: logrus.StandardLogger(), Message: "Observing the host failed"})
	handler := http.NewServeMux()
	handler.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{
		MaxRequestsInFlight: 4, // a scrape queries every relay
		Timeout:             time.Minute,
	}))
	server := &http.Server{Addr: listen, Handler: handler, ReadHeaderTimeout: 10 * time.Second}
	ended := make(chan error, 1)
	go func() { ended <- server.ListenAndServe() }()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
	}
	err := server.Close()
	if served := <-ended; !errors.Is(served, http.ErrServerClosed) {
		err = errors.Join(err, served)
	}
	return err
}
