package main

import "strings"

// public are folders whose identifiers other modules use.
var public = []string{"relay/client"}

// exceptions are identifiers without a user in another package, with the reason.
var exceptions = map[string]string{
	"internal/testutil.Context": "a wait that docs/contributing.md offers to tests",
}

func inPublic(name string) bool {
	for _, folder := range public {
		if strings.HasPrefix(name, folder+".") {
			return true
		}
	}
	return false
}
