package launch

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
)

func TestSecretsAreMarshalledAndNotPrinted(t *testing.T) {
	s := Secrets{ClusterKey: NewSecret([]byte("of the cluster")), CertificateKey: NewSecret([]byte("of the host"))}
	type holder struct { // whose fields fmt does not ask
		all Secrets
		one Secret
	}
	hidden := holder{s, s.ClusterKey}
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%d"} {
		for _, value := range []any{s, &s, s.ClusterKey, []any{s.ClusterKey}, hidden, &hidden, []holder{hidden}} {
			text := fmt.Sprintf(verb, value)
			for _, secret := range []string{"cluster", fmt.Sprintf("%x", "cluster"), "99 108 117", "0x63, 0x6c, 0x75"} {
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
	if err := json.Unmarshal(text, &again); err != nil || !bytes.Equal(again.ClusterKey.Bytes(), s.ClusterKey.Bytes()) ||
		!bytes.Equal(again.CertificateKey.Bytes(), s.CertificateKey.Bytes()) ||
		!again.Authority.IsZero() ||
		bytes.Contains(text, []byte("authority")) {
		t.Errorf("%v after another reading: %v, %v", s, again, err)
	}
}
