//go:build !front

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/exporter-toolkit/web"
	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/cmd/peerlane/exporter"
	"github.com/peerlane/peerlane/hook/generation"
)

// exporterAddress is the default address of the exporter. It is a loopback address because metrics
// describe containers: remote access requires an explicit address.
const exporterAddress = "127.0.0.1:9836"

func newExporterCommand(a *app) *cobra.Command {
	var addresses []string
	var webConfig, collector string
	var once, names bool
	cmd := &cobra.Command{
		Use:   "exporter",
		Short: "Export metrics of relays to Prometheus",
		Long: `Export metrics of this host's relays to Prometheus, at /metrics: for each container and
lane bytes, operations, durations, waits and failures, the staging memory of each relay,
and the number of relays in each state. docs/metrics.md lists every metric. The exporter
queries the relays at each scrape only.

The default address is on loopback; --listen sets others. --web-config is a file of
Prometheus' exporter-toolkit for TLS and passwords.

Every user of the host can connect to loopback, so the label container is empty there.
It is set at a socket, --listen unix:PATH, which only user and group of the exporter can
open, and at every address with --container-labels. With tenancy = "multi" the exporter
starts only if exporter.multi_tenancy of config.toml is true.

Only root can read the state of relays. peerlane-exporter.service runs as the user
peerlane-exporter, and reads the state from the socket of
peerlane-exporter-collector.socket (--collector).`,
		Example: `  peerlane exporter
  peerlane exporter --listen unix:/run/peerlane-exporter/metrics.sock
  peerlane exporter --listen :9836 --web-config /etc/peerlane/web.yaml
  peerlane exporter --once | promtool check metrics`,
		Args: noArgs,
	}
	flags := cmd.Flags()
	flags.StringArrayVar(&addresses, "listen", []string{exporterAddress},
		"listen at `ADDRESS:PORT` or unix:PATH; may be given more than once")
	flags.StringVar(&webConfig, "web-config", "",
		"take TLS and passwords from `FILE`, the exporter-toolkit's web configuration")
	flags.StringVar(&collector, "collector", "",
		"read the state of relays from the `SOCKET` of peerlane-exporter-collector.socket, without root")
	flags.BoolVar(&names, "container-labels", false, "export container ids at every address")
	flags.BoolVar(&once, "once", false, "print the metrics once, and exit")
	completeFiles(cmd, "web-config", "yaml", "yml")
	completeFiles(cmd, "collector", "sock")
	cmd.AddCommand(newCollectCommand(a))
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if once && (flags.Changed("listen") || flags.Changed("web-config")) {
			return usageError{cmd.CommandPath(), errors.New("--once prints and does not listen: omit --listen and --web-config")}
		}
		if err := exporter.CheckTenancy(a.layout); err != nil {
			return err
		}
		source := exporter.Host(a.layout)
		if collector != "" {
			source = exporter.Remote(collector)
		} else if _, err := generation.List(a.layout); err != nil { // fail now instead of at every scrape
			return asRoot(err)
		}
		if once {
			return a.printMetrics(a.metrics(source, names))
		}
		if err := web.Validate(webConfig); err != nil {
			return fmt.Errorf("--web-config %s: %w", webConfig, err)
		}
		ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, unix.SIGTERM)
		defer stop()
		return a.export(ctx, a.metrics(source, names), a.metrics(source, true), addresses, webConfig)
	}
	return cmd
}

// newCollectCommand returns the hidden command of peerlane-exporter-collector@.service.
func newCollectCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use: "collect", Hidden: true, Short: "Write the state of all relays to standard output, for peerlane exporter " +
			"--collector", Args: noArgs,
		RunE: func(*cobra.Command, []string) error {
			if err := exporter.CheckTenancy(a.layout); err != nil {
				return err
			}
			return exporter.Write(a.out.Document(), exporter.Host(a.layout))
		},
	}
}

// metrics returns a registry with the metrics of a source.
func (a *app) metrics(source exporter.Source, names bool) *prometheus.Registry {
	registry := prometheus.NewRegistry()
	registry.MustRegister(exporter.New(source, names, func(
		err error) {
		a.log.WithError(err).Warn("reading the state of relays")
	}))
	return registry
}

// printMetrics prints every metric in the text format of Prometheus.
func (a *app) printMetrics(g prometheus.Gatherer) error {
	families, err := g.Gather()
	if err != nil {
		return err
	}
	for _, f := range families {
		if _, err := expfmt.MetricFamilyToText(a.out.Document(), f); err != nil {
			return err
		}
	}
	return nil
}

// unixPrefix begins an address that is a path of a socket.
const unixPrefix = "unix:"

// errTaken is the error of a socket at which another process listens.
var errTaken = errors.New("another process listens at the socket")

// listen listens at an address. A socket in the file system is accessible to the exporter's user
// and group only.
func listen(address string) (net.Listener, error) {
	path, unixSocket := strings.CutPrefix(address, unixPrefix)
	if !unixSocket {
		return net.Listen("tcp", address)
	}
	if info, err := os.Lstat(path); err == nil && info.Mode()&os.ModeSocket != 0 {
		if c, err := net.Dial("unix", path); err == nil {
			c.Close()
			return nil, fmt.Errorf("%s: %w", path, errTaken)
		}
		if err := os.Remove(path); err != nil { // a killed exporter left the socket
			return nil, err
		}
	}
	// Between bind and chmod, the umask denies other users the socket.
	before := unix.Umask(0o117)
	l, err := net.Listen("unix", path)
	unix.Umask(before)
	return l, err
}

// exporterPage is the start page of the exporter, for browsers.
const exporterPage = `<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>peerlane exporter</title></head>
<body><h1>peerlane exporter</h1><p><a href="/metrics">Metrics</a></p></body></html>
`

// export serves until ctx ends: withNames at Unix sockets, and metrics at TCP addresses.
func (a *app) export(ctx context.Context, metrics, withNames prometheus.Gatherer, addresses []string,
	webConfig string) error {
	var network, files []net.Listener
	for _, address := range addresses {
		l, err := listen(address)
		if err != nil {
			for _, l := range slices.Concat(network, files) {
				l.Close()
			}
			return fmt.Errorf("listen at %s: %w", address, err)
		}
		tcp, ok := l.Addr().(*net.TCPAddr)
		if !ok {
			files = append(files, l)
			a.log.Infof("metrics are at the socket %s", l.Addr())
			continue
		}
		network = append(network, l)
		if !tcp.IP.IsLoopback() && webConfig == "" {
			a.log.Warnf("every client that reaches %s can read the metrics of containers; --web-config sets TLS and passwords",
				l.Addr())
		}
		a.log.Infof("metrics are at %s/metrics", l.Addr())
	}
	serve := func(g prometheus.Gatherer) *http.Server {
		handler := http.NewServeMux()
		handler.Handle("GET /metrics", promhttp.HandlerFor(g, promhttp.HandlerOpts{
			MaxRequestsInFlight: 4, // a scrape queries every relay
			Timeout:             time.Minute,
		}))
		handler.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/html; charset=utf-8")
			_, _ = io.WriteString(w, exporterPage) // the client may have disconnected
		})
		return &http.Server{Handler: handler, ReadHeaderTimeout: 10 * time.Second}
	}
	servers := []*http.Server{serve(metrics), serve(withNames)}
	// Let a scrape in progress finish.
	ctx, fail := context.WithCancel(ctx)
	defer fail()
	ended := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(ended)
		late, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		for _, s := range servers {
			_ = s.Shutdown(late) // scrapes beyond the deadline are aborted
		}
	})
	errs := make(chan error)
	count := len(files)
	for _, l := range files {
		go func() { errs <- servers[1].Serve(l) }()
	}
	if len(network) > 0 {
		count++
		systemd := false
		go func() {
			errs <- web.ServeMultiple(network, servers[0], &web.FlagConfig{WebListenAddresses: &addresses,
				WebSystemdSocket: &systemd, WebConfigFile: &webConfig},
				slog.New(slog.NewTextHandler(a.errOut.Document(), &slog.HandlerOptions{Level: slog.LevelWarn})))
		}()
	}
	var failed error
	for range count {
		if err := <-errs; err != nil && !errors.Is(err, http.ErrServerClosed) {
			failed = errors.Join(failed, err)
			fail() // stop the other servers
		}
	}
	if !stop() {
		<-ended
	}
	return failed
}
