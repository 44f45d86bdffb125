//go:build !front

package main

import (
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/spf13/cobra"

	"github.com/peerlane/peerlane/cmd/terminal"
	"github.com/peerlane/peerlane/cmd/terminal/table"
	"github.com/peerlane/peerlane/hook/control"
)

func newTopCommand(a *app) *cobra.Command {
	interval, once, connections := time.Second, false, false
	cmd := &cobra.Command{
		Use:   "top [NAME...]",
		Short: "Show the current traffic of relays",
		Long: `Show the traffic of relays: for each lane, and with --connections for each connection,
bytes and operations per second, operations in flight, durations, and waits:

  no_grant   the receiver has posted no receive, or has no free slot
  no_slot    no staging slot is free, or the connection has used its share
  ring_full  the client does not read completions, or its ring is full

A wait is shown as the average number of waiting operations, the current number, and
the longest current wait. On a terminal the table is updated each interval until
Ctrl-C; otherwise, and with --once, one interval is printed. Without a NAME every relay
is shown.

` + relayNames,
		Example: `  peerlane relay top
  peerlane relay top trainer --connections --once
  peerlane relay top --interval 10s -o json`,
	}
	flags := cmd.Flags()
	flags.DurationVar(&interval, "interval", interval, "length of the measured interval")
	flags.BoolVar(&once, "once", false, "print one interval and exit")
	flags.BoolVar(&connections, "connections", false, "also show each connection")
	form := addForm(cmd)
	cmd.ValidArgsFunction = a.completeRelays
	cmd.RunE = func(cmd *cobra.Command, names []string) error {
		if interval < 10*time.Millisecond || interval > time.Hour {
			return usageError{cmd.CommandPath(), fmt.Errorf("--interval %v: must be 10 ms to 1 h", interval)}
		}
		screen := a.out.File()
		var before control.Reports
		for {
			infos, err := a.relaysOrAll(names, len(names) == 0)
			if err != nil {
				return asRoot(err)
			}
			rates, now := control.Watch(a.layout, infos, before, interval)
			switch {
			case form.value == formJSON:
				return a.printJSON(rates)
			case once || screen == nil:
				_, _ = io.WriteString(a.out.Document(), a.topText(rates, connections))
				return nil
			}
			// A single write avoids flicker: home, the text with the rest of each line erased, and
			// then the rest of the screen erased.
			text := strings.ReplaceAll(a.topText(rates, connections), "\n", "\x1b[K\n")
			if _, err := io.WriteString(screen, "\x1b[H"+text+"\x1b[J"); err != nil {
				return err
			}
			before = now
			time.Sleep(interval)
		}
	}
	return cmd
}

// topText returns a sanitised table of lanes or of connections.
func (a *app) topText(rates []control.Rates, connections bool) string {
	if len(rates) == 0 {
		return "No container has a relay.\n"
	}
	lanes := a.newTable("CONTAINER", "GPU", "", "GB/S", "MESSAGES/S", "IN FLIGHT", "FAILED", "P50", "P99", "WAITING FOR")
	each := a.newTable("CONTAINER", "PROCESS", "CONNECTION", "GPU", "", "GB/S", "MESSAGES/S", "IN FLIGHT", "FAILED",
		"P50", "P99", "WAITING FOR")
	more, missing := 0, ""
	for _, r := range rates {
		name := r.Container
		if r.NoReport != "" {
			missing += fmt.Sprintf("%s: %s\n", terminal.Sanitise(name), terminal.Sanitise(r.NoReport))
			continue
		}
		if len(r.Lanes) == 0 {
			lanes.AppendRow(table.Row{name, "-", "-", "-", "-", "-", "-", "-", "-", "nothing has been sent or received"})
		}
		for _, l := range r.Lanes {
			lanes.AppendRow(append(table.Row{name}, figures(l, r.Seconds)...))
		}
		for _, c := range r.Connections {
			number := fmt.Sprintf("%d, %s with %s", c.Number, dash(c.Route), c.Peer)
			process := strings.TrimSpace(fmt.Sprintf("%d %s", c.PID, c.Program))
			each.AppendRow(append(table.Row{name, process, number}, figures(c, r.Seconds)...))
		}
		more += r.MoreConnections
	}
	var b strings.Builder
	w := terminal.New(&b)
	if lanes.Length() > 0 {
		w.Println(lanes.Render())
	}
	if connections && each.Length() > 0 {
		w.Printf("\n%s\n", each.Render())
	}
	if connections && more > 0 {
		w.Printf("%d more connections, which moved less in all, are not shown.\n", more)
	}
	w.PrintLines(missing)
	return b.String()
}

// figures returns the cells of a lane or a connection.
func figures(r control.Rate, seconds float64) table.Row {
	direction := "receives"
	if r.Sends {
		direction = "sends"
	}
	perSecond := func(n uint64) float64 {
		if seconds <= 0 {
			return 0
		}
		return float64(n) / seconds
	}
	took := func(us float64) string {
		if us == 0 {
			return "-"
		}
		return (time.Duration(us*1e3) * time.Nanosecond).Round(100 * time.Nanosecond).String()
	}
	var stalls []string
	for _, s := range r.Stalls {
		var parts []string
		if seconds > 0 && s.Count > 0 {
			parts = append(parts, fmt.Sprintf("%.1f", s.Time.Seconds()/seconds))
		}
		if s.Waiting > 0 {
			parts = append(parts, fmt.Sprintf("(%d now, for %v)", s.Waiting, s.Longest.Round(time.Millisecond)))
		}
		if len(parts) > 0 {
			stalls = append(stalls, s.Cause+" "+strings.Join(parts, " "))
		}
	}
	if r.InPlace > 0 {
		direction += fmt.Sprintf(", %.0f %% in place", 100*float64(r.InPlace)/float64(r.Bytes))
	}
	return table.Row{
		r.GPU, direction, fmt.Sprintf("%.2f", perSecond(r.Bytes)/1e9), humanize.CommafWithDigits(perSecond(r.Operations), 0),
		r.InFlight, r.Failed, took(r.P50), took(r.P99), dash(strings.Join(stalls, ", ")),
	}
}
