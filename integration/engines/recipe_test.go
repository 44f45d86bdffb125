//go:build engines

package engines

import (
	"context"
	"os"
	"strings"
	"time"

	"github.com/peerlane/peerlane/internal/testutil"
)

// documented returns the first block in a language below a heading of docs/containers.md.
func documented(b *bed, heading, language string) string {
	b.Helper()
	text, err := os.ReadFile("../../docs/containers.md")
	if err != nil {
		b.Fatal(err)
	}
	_, below, found := strings.Cut(string(text), "\n### "+heading+"\n")
	below, _, _ = strings.Cut(below, "\n#")
	_, block, open := strings.Cut(below, "\n```"+language+"\n")
	block, _, closed := strings.Cut(block, "\n```")
	if !found || !open || !closed {
		b.Fatalf("docs/containers.md has no block of %s below %q", language, heading)
	}
	return block + "\n"
}

// recipe runs the commands of the documentation unchanged. The environment tells the client the
// engine's address; the image has the name in the text.
func recipe(b *bed, _ check) {
	b.Helper()
	ctx, cancel := testutil.WithLimit(context.Background(), time.Minute)
	defer cancel()
	block := documented(b, b.row.recipe, "sh")
	c := b.ground.command(ctx, "sh", "-c", `cd "$0" && set -eux && `+block, b.mkdir("recipe"))
	out, err := c.CombinedOutput()
	if err != nil {
		b.Fatalf("%v: %s", err, out)
	}
	// The CRI has no output to show; the status of the container has the result.
	if b.row.recipe[:3] != "CRI" && !strings.Contains(string(out), "\nrelay.sock\n") {
		b.Errorf("the container does not show its relay's socket: %s", out)
	}
}
