package main

import "strings"

// public are folders whose identifiers other modules use.
var public = []string{"relay/client"}

// exceptions are identifiers without a user in another package, with the reason.
var exceptions = map[string]string{
	"internal/testutil.Context": "a wait that docs/contributing.md offers to tests",

	"hook.State.Root":                       "encoding/json sets the field",
	"hook.State.Annotations":                "encoding/json sets the field",
	"hook/internal/ocispec.Spec.Root":       "encoding/json sets the field",
	"cuda/sim.DeviceLog.BytesWithin":        "cmp.Diff compares the struct",
	"integration/vm/pcitree.Function.UUID":  "cmp.Diff compares the struct",
	"relay/wire.Header.Type":                "part of the layout of messages",
	"relay/wire.Header.Sequence":            "part of the layout of messages",
	"integration/traffic.Life.Stays":        "the package sets the field",
	"relay/transport/tcp.Config.Alone":      "tests of the package set the field",
	"relay/transport/tcp.Config.Channels":   "tests of the package set the field",
	"relay/transport/tcp.Config.Eager":      "tests of the package set the field",
	"relay/transport/tcp.Config.Waiting":    "tests of the package set the field",
	"relay/transport/tcp.Figures.Pieces":    "tests of the package read the field",
	"relay/transport/tcp.Gathering.Pieces":  "tests of the package set the field",
	"relay/transport/verbs.Config.PortWait": "tests of the package set the field",
}

func inPublic(name string) bool {
	for _, folder := range public {
		if strings.HasPrefix(name, folder+".") {
			return true
		}
	}
	return false
}
