//! A trust file (`t`), a file of signatures (`s`), and the text under a signature that is right (`c`).

use crate::kind;
use crate::text::told;
use kvasir::policy::trust::{
    SecretKey, Signature, TrustedKey, TrustedKeys, parse_signatures, print_signatures,
};
use kvasir::policy::{Digest, SlotKind};
use std::sync::LazyLock;

/// RFC 8410, appendix A.
static KEY: LazyLock<SecretKey> = LazyLock::new(|| {
    let pem = "-----BEGIN PRIVATE KEY-----\nMC4CAQAwBQYDK2VwBCIEINTuctv5E1hK1bbY8fdp+K06/nwoy/HU++CXqI9EdVhC\n-----END PRIVATE KEY-----\n";
    SecretKey::from_pem(pem).expect("a key")
});

pub(crate) fn run(data: &[u8]) {
    match kind(data) {
        Some((b't', text)) => trust_file(text),
        Some((b's', text)) => signatures(text),
        Some((b'c', text)) => claim(text),
        _ => {}
    }
}

fn trust_file(text: &[u8]) {
    let Ok(text) = str::from_utf8(text) else { return };
    match TrustedKeys::parse(text) {
        Ok(keys) => {
            let printed: String = keys.0.iter().map(TrustedKey::to_toml).collect();
            assert_eq!(TrustedKeys::parse(&printed), Ok(keys));
        }
        Err(refusal) => drop(told(&refusal)),
    }
}

fn signatures(text: &[u8]) {
    let read = match parse_signatures(text) {
        Ok(read) => read,
        Err(refusal) => return drop(told(&refusal)),
    };
    assert_eq!(parse_signatures(&print_signatures(&read)).as_ref(), Ok(&read));
    // Nobody else's signature is ever taken for this key's.
    let keys = TrustedKeys::only(KEY.public());
    for slot in SlotKind::ALL {
        let refused = keys.check(slot, Digest::of(b"component"), &read).map(str::to_owned);
        told(&refused.expect_err("signed by somebody else"));
    }
}

fn claim(payload: &[u8]) {
    let signed = Signature { payload: payload.to_vec(), signature: KEY.sign(payload).to_vec() };
    let key = KEY.public();
    let Some(claim) = signed.claim(&key) else { return };
    assert_eq!(claim.sign(&KEY).claim(&key).as_ref(), Some(&claim));
    let keys = TrustedKeys::only(key);
    let trusted = |slot, component| keys.check(slot, component, std::slice::from_ref(&signed)).is_ok();
    for slot in SlotKind::ALL {
        assert_eq!(trusted(slot, claim.component), slot == claim.slot);
        assert!(!trusted(slot, Digest::of(payload)), "another component");
    }
}
