//! The credentials that a registry wants to see before it answers, and where they are found.

use super::super::Error;
use super::super::reference::Reference;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use docker_credential::{CredentialRetrievalError, DockerCredential};
use reqwest::header::{HeaderMap, HeaderValue, WWW_AUTHENTICATE};
use serde::Deserialize;
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::PathBuf;

/// Largest file of logins that is read.
const CONFIG_BYTES_MAX: u64 = 1 << 20;

/// A name and a secret.
#[derive(Clone)]
pub struct Credential {
    pub username: String,
    pub password: String,
}

impl fmt::Debug for Credential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Credential({})", self.username)
    }
}

impl Credential {
    /// What `docker login` left for the registry in `~/.docker/config.json` (or where `DOCKER_CONFIG` says), or a helper named
    /// there knows.
    ///
    /// # Errors
    /// There is something, and it cannot be used.
    pub fn of_docker(reference: &Reference) -> Result<Option<Self>, Error> {
        let Reference { registry, .. } = reference;
        let unusable = |reason: String| Error::Credentials { registry: registry.clone(), reason };
        let server = if registry == "docker.io" { "https://index.docker.io/v1/" } else { registry };
        let Some(config) = docker_config() else { return Ok(None) };
        let file = match File::open(&config) {
            Ok(file) => file.take(CONFIG_BYTES_MAX),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(unusable(format!("{}: {error}", config.display()))),
        };
        use CredentialRetrievalError::{HelperFailure, NoCredentialConfigured};
        match docker_credential::get_credential_from_reader(file, server) {
            Ok(DockerCredential::UsernamePassword(username, password)) => {
                Ok(Some(Self { username, password }))
            }
            Ok(DockerCredential::IdentityToken(_)) => {
                Err(unusable("docker has an identity token; give --username and --password-stdin".into()))
            }
            Err(NoCredentialConfigured) => Ok(None),
            // A helper's output may have the secret in it.
            Err(HelperFailure { helper, .. }) => Err(unusable(format!(
                "docker's helper `{helper}` failed; give --username and --password-stdin"
            ))),
            Err(error) => Err(unusable(format!("{}: {error}", config.display()))),
        }
    }
}

/// Where docker keeps its logins; there need be no such file.
fn docker_config() -> Option<PathBuf> {
    let folder = std::env::var_os("DOCKER_CONFIG").map(PathBuf::from);
    let folder = folder.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".docker")));
    Some(folder?.join("config.json"))
}

/// What goes with each request.
#[derive(Default)]
pub(super) struct Authorization(Option<HeaderValue>);

impl Authorization {
    /// `None` means that there is no credential to show.
    pub(super) fn basic(credential: Option<&Credential>) -> Option<Self> {
        let Credential { username, password } = credential?;
        Self::of("Basic", &BASE64_STANDARD.encode(format!("{username}:{password}")))
    }

    /// Reads it from the answer of a token server. `None` means that there is no token in it.
    pub(super) fn token(answer: &[u8]) -> Option<Self> {
        #[derive(Deserialize)]
        struct Answer {
            token: Option<String>,
            access_token: Option<String>,
        }
        let Answer { token, access_token } = serde_json::from_slice(answer).ok()?;
        Self::of("Bearer", &token.or(access_token)?)
    }

    fn of(scheme: &str, secret: &str) -> Option<Self> {
        let mut value = HeaderValue::from_str(&format!("{scheme} {secret}")).ok()?;
        value.set_sensitive(true);
        Some(Self(Some(value)))
    }

    pub(super) fn header(&self) -> Option<HeaderValue> {
        self.0.clone()
    }
}

/// How a registry wants its callers to log in.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Challenge {
    Basic,
    Bearer { realm: String, query: Vec<(String, String)> },
}

impl Challenge {
    /// The first of its demands that can be met.
    pub(super) fn of(headers: &HeaderMap) -> Option<Self> {
        let texts = headers.get_all(WWW_AUTHENTICATE).iter();
        texts.filter_map(|text| text.to_str().ok()).find_map(Self::parse)
    }

    fn parse(text: &str) -> Option<Self> {
        let (scheme, rest) = text.trim().split_once(' ').unwrap_or((text, ""));
        if scheme.eq_ignore_ascii_case("basic") {
            return Some(Self::Basic);
        }
        scheme.eq_ignore_ascii_case("bearer").then_some(())?;
        let (mut realm, mut query) = (None, Vec::new());
        for (key, value) in parameters(rest) {
            match key {
                "realm" => realm = Some(value.to_owned()),
                "service" | "scope" => query.push((key.to_owned(), value.to_owned())),
                _ => {}
            }
        }
        Some(Self::Bearer { realm: realm?, query })
    }
}

/// `key="value"` after `key="value"`, with commas between them and perhaps in them.
fn parameters(mut rest: &str) -> Vec<(&str, &str)> {
    let mut found = Vec::new();
    while let Some((key, after)) = rest.split_once('=') {
        let (value, after) = match after.strip_prefix('"') {
            Some(quoted) => quoted.split_once('"').unwrap_or((quoted, "")),
            None => after.split_once(',').unwrap_or((after, "")),
        };
        found.push((key.trim_matches([',', ' ']), value));
        rest = after;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn challenges_of_real_registries_are_understood() {
        let bearer = |realm: &str, query: &[(&str, &str)]| {
            let query = query.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
            Some(Challenge::Bearer { realm: realm.into(), query })
        };
        let hub = "Bearer realm=\"https://auth.docker.io/token\",service=\"registry.docker.io\",scope=\"repository:a/b:pull,push\"";
        let query = [("service", "registry.docker.io"), ("scope", "repository:a/b:pull,push")];
        assert_eq!(Challenge::parse(hub), bearer("https://auth.docker.io/token", &query));
        assert_eq!(Challenge::parse("bearer realm=/token, error=invalid"), bearer("/token", &[]));
        assert_eq!(Challenge::parse("Basic realm=\"x\""), Some(Challenge::Basic));
        for text in ["", "Digest realm=\"x\"", "Bearer", "Bearer scope=\"a\"", "Bearer realm"] {
            assert_eq!(Challenge::parse(text), None, "{text}");
        }
        assert_eq!(Challenge::parse("Bearer realm=\"open"), bearer("open", &[]));
    }

    #[test]
    fn tokens_are_taken_from_either_field() {
        let header = |answer: &str| Authorization::token(answer.as_bytes()).and_then(|a| a.header());
        assert_eq!(header("{\"token\":\"a\"}").unwrap(), "Bearer a");
        assert_eq!(header("{\"access_token\":\"b\",\"expires_in\":60}").unwrap(), "Bearer b");
        for answer in ["", "{}", "[]", "{\"token\":7}", "{\"token\":\"a\\nb\"}"] {
            assert!(header(answer).is_none(), "{answer}");
        }
        let secret = Credential { username: "me".into(), password: "secret".into() };
        assert!(!format!("{secret:?}").contains("secret"));
        let basic = Authorization::basic(Some(&secret)).unwrap().header().unwrap();
        assert_eq!(basic, "Basic bWU6c2VjcmV0");
        assert!(Authorization::basic(None).is_none());
    }
}
