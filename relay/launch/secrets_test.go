package launch

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
)

func TestSecretsAreMarshalledAndNotPrinted(t *testing.T) {
	s := Secrets{ClusterKey: Secret("of the cluster"), CertificateKey: Secret("of the host")}
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%d"} {
		for _, value := range []any{s, &s, s.ClusterKey, []any{s.ClusterKey}} {
			text := fmt.Sprintf(verb, value)
			for _, secret := range []string{"cluster", fmt.Sprintf("%x", "cluster"), "99 108 117"} {
				if strings.Contains(strings.ReplaceAll(text, "ClusterKey", ""), secret) {
					t.Errorf("%s prints %s", verb, text)
				}
			}
		}
	}
	text, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	var again Secrets
	if err := json.Unmarshal(text, &again); err != nil || !bytes.Equal(again.ClusterKey, s.ClusterKey) || !bytes.Equal(again.CertificateKey, s.CertificateKey) || again.Authority != nil {
		t.Errorf("%v after another reading: %v, %v", s, again, err)
	}
}
