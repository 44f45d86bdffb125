//go:build !front

package main

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/spf13/cobra"

	"github.com/peerlane/peerlane/cmd/terminal"
	"github.com/peerlane/peerlane/cmd/terminal/table"
	"github.com/peerlane/peerlane/hook/collector"
	"github.com/peerlane/peerlane/hook/control"
	"github.com/peerlane/peerlane/hook/generation"
)

func newRelayCommand(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "relay",
		Short: "Manage the relays of this host's containers",
		Long: `Manage the relays of this host's containers. Each container with a lane has one relay,
which starts and ends with the container.`,
		Example: `  peerlane relay list
  peerlane relay inspect trainer
  peerlane relay top`,
	}
	cmd.AddCommand(newListCommand(a), newInspectCommand(a), newTopCommand(a), newStopCommand(a), newDrainCommand(a),
		newResumeCommand(a), newGCCommand(a))
	return group(cmd)
}

func newListCommand(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List containers with a relay, and the relay's state",
		Long: `List the containers with a relay, oldest first, and the state of the relay:

  starting  the relay has not answered yet
  ready     the relay serves the container's lanes
  waiting   the relay died and will be started again
  down      the relay died too often; clients are refused
  stopping  the relay was stopped and is ending
  stopped   the relay was stopped; clients are refused until peerlane relay resume
  draining  the relay starts no new work, and copies are in progress
  drained   the relay has released the GPUs; clients are refused until resume
  ending    the container has ended
  left      no supervisor runs; peerlane relay gc removes the relay once the
            container has ended

The table fits 100 columns: ids have 12 characters, as in docker ps. -o wide has whole
ids, processes and generations.`,
		Example: `  peerlane relay list
  peerlane relay list -o json | jq '.[] | select(.status.state != "ready")'`,
		Args: noArgs,
	}
	form := addForm(cmd, formWide)
	cmd.RunE = func(*cobra.Command, []string) error {
		relays, err := generation.List(a.layout)
		// Print the readable relays even with an error.
		if form.value == formJSON {
			if relays == nil {
				relays = []generation.Info{}
			}
			if printErr := a.printJSON(relays); printErr != nil {
				return printErr
			}
			return asRoot(err)
		}
		if len(relays) > 0 {
			a.out.Println(a.relayTable(relays, form.value).Render())
		} else if err == nil {
			a.out.Println("No container has a relay.")
		}
		drained, markErr := generation.AllDrained(a.layout)
		if drained != nil {
			a.out.Printf("All relays of this host are drained since %s; peerlane relay resume --all resumes them.\n",
				drained.Since.Format(time.RFC3339))
		}
		return asRoot(errors.Join(err, markErr))
	}
	return cmd
}

// shortID returns the part of an id that docker ps and podman ps show.
func shortID(id string) string { return id[:min(len(id), 12)] }

// relayTable returns a table with a row for each relay. Unless form is wide, the table cuts names
// at 20 characters.
func (a *app) relayTable(relays []generation.Info, form string) *table.Writer {
	wide := form == formWide
	t := a.newTable("CONTAINER", "NAME", "GPUS", "STARTS", "CREATED", "STATE", "ERROR")
	if wide {
		t = a.newTable("GENERATION", "CONTAINER", "NAME", "INIT", "GPUS", "RELAY", "STARTS", "CREATED", "STATE", "ERROR")
	}
	for _, r := range relays {
		var gpus []string
		for _, lane := range r.Config.Lanes {
			gpus = append(gpus, strconv.Itoa(lane.GPU.Index))
		}
		relay := ""
		if r.Status.Relay != nil {
			relay = strconv.Itoa(r.Status.Relay.PID)
		}
		name := ""
		if names := control.Names(r.Container); len(names) > 0 {
			name = names[0]
		}
		all := strings.Join(gpus, ", ")
		if !wide {
			if len(name) > 20 {
				name = name[:19] + "…"
			}
			if len(all) > 15 {
				all = fmt.Sprintf("%d GPUs", len(gpus))
			}
			t.AppendRow(table.Row{
				dash(shortID(r.Container.ID)), dash(name), all,
				strconv.Itoa(r.Status.Starts), humanize.Time(r.Created), a.relayState(r), dash(r.Status.Error),
			})
			continue
		}
		t.AppendRow(table.Row{
			r.ID, dash(r.Container.ID), dash(name), strconv.Itoa(r.Init.PID), all, dash(relay),
			strconv.Itoa(r.Status.Starts), humanize.Time(r.Created), a.relayState(r), dash(r.Status.Error),
		})
	}
	a.fit(t, "ERROR", form)
	return t
}

// relayState returns the state that the supervisor wrote, unless no supervisor runs.
func (a *app) relayState(r generation.Info) terminal.Styled {
	switch {
	case !r.Supervised:
		return a.paint("left", red)
	case r.Status.State == "": // the supervisor has not written a state yet
		return a.paint(generation.StateStarting)
	case r.Status.State == generation.StateReady:
		return a.paint(r.Status.State, green)
	case r.Status.State == generation.StateDown, r.Status.State == generation.StateStopped:
		return a.paint(r.Status.State, red)
	}
	return a.paint(r.Status.State, yellow)
}

func newGCCommand(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "gc",
		Short: "Remove files and processes of ended containers",
		Long: `Remove sockets, state and relays of ended containers whose supervisor was killed.
Running containers are not affected. The hook does the same whenever a container starts
or ends.`,
		Example: `  peerlane relay gc`,
		Args:    noArgs,
	}
	form := addForm(cmd)
	cmd.RunE = func(*cobra.Command, []string) error {
		removed, err := collector.Collect(a.layout)
		if form.value == formJSON {
			if removed == nil {
				removed = []string{}
			}
			if printErr := a.printJSON(struct {
				Removed []string `json:"removed"`
			}{removed}); printErr != nil {
				return printErr
			}
			return asRoot(err)
		}
		for _, id := range removed {
			a.out.Printf("removed %s\n", id)
		}
		if len(removed) == 0 && err == nil {
			a.out.Println("Nothing is left to remove.")
		}
		return asRoot(err)
	}
	return cmd
}
