//! A repository of a registry, as the OCI distribution specification has it (<https://github.com/opencontainers/distribution-spec>).
//!
//! A registry is trusted with nothing: every answer has a bound that is kept while it is read, every blob is held against the
//! digest it was asked for by, and credentials go to its own host alone, or to the one it names for tokens. The client of
//! the `oci-client` crate reads manifests, tokens and errors to whatever length a registry sends them, which is why this one exists.

mod login;

pub use login::Credential;

use super::artifact::{DOCUMENT_BYTES_MAX, Descriptor, MANIFEST, Manifest};
use super::reference::{Reference, Version};
use super::{COMPONENT_BYTES_MAX, Error, Package, check_digest, cosign};
use crate::policy::Digest;
use crate::policy::trust::{PAYLOAD_BYTES_MAX, Signature};
use crate::text::printable;
use login::{Authorization, Challenge};
use parking_lot::Mutex;
use reqwest::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, LOCATION};
use reqwest::{Method, RequestBuilder, Response, StatusCode, Url};
use std::time::Duration;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest wait between two pieces of an answer.
const READ_TIMEOUT: Duration = Duration::from_secs(30);
/// Longest time from the first byte of a request to the last one of its answer.
const TIMEOUT: Duration = Duration::from_secs(600);
/// The most bytes kept of a registry's own words about an error.
const ERROR_BYTES: usize = 500;

/// One repository. Every call may ask for a login on its way.
pub struct Registry {
    http: reqwest::Client,
    /// `https://HOST/v2/REPOSITORY/`.
    base: Url,
    /// As the reference has it.
    name: String,
    repository: String,
    plain: bool,
    credential: Option<Credential>,
    authorization: Mutex<Authorization>,
}

impl Registry {
    /// The repository that `reference` names; nothing is sent yet. `plain` allows HTTP without TLS, which a registry on this machine
    /// may always speak.
    ///
    /// # Errors
    /// The system has no usable TLS.
    pub fn of(reference: &Reference, credential: Option<Credential>, plain: bool) -> Result<Self, Error> {
        // Someone else in this process may have chosen a provider before; that one is fine as well.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let Reference { registry, repository, .. } = reference;
        let unusable = |reason: String| Error::Unreachable { registry: registry.clone(), reason };
        let plain = plain || reference.is_loopback();
        let mut http = reqwest::Client::builder()
            .user_agent(concat!("kvasir/", env!("CARGO_PKG_VERSION")))
            .connect_timeout(CONNECT_TIMEOUT)
            .read_timeout(READ_TIMEOUT)
            .timeout(TIMEOUT)
            .https_only(!plain);
        if reference.is_loopback() {
            http = http.no_proxy();
        }
        // Docker Hub answers at another name than it goes by.
        let host = if registry == "docker.io" { "registry-1.docker.io" } else { registry };
        let scheme = if plain { "http" } else { "https" };
        let base = format!("{scheme}://{host}/v2/{repository}/");
        Ok(Self {
            http: http.build().map_err(|error| unusable(error.to_string()))?,
            base: base.parse().map_err(|_| unusable(format!("`{host}` is no host")))?,
            name: registry.clone(),
            repository: repository.clone(),
            plain,
            credential,
            authorization: Mutex::default(),
        })
    }

    /// Fetches a policy with its signatures, and compares every part with its digest.
    ///
    /// # Errors
    /// It is not there, not a policy, too large or not what its digests say; or the registry fails.
    pub async fn pull(&self, version: &Version) -> Result<Package, Error> {
        let manifest = self.manifest(version).await?;
        let parsed = Manifest::parse(&manifest)?;
        let (config, component) = parsed.of_policy()?;
        let config = self.blob("the config", config, DOCUMENT_BYTES_MAX).await?;
        let component = self.blob("the component", component, COMPONENT_BYTES_MAX).await?;
        let signatures = self.signatures(Digest::of(&manifest)).await?;
        Package::checked(manifest, config, component, signatures)
    }

    /// Stores a policy under `version`, and its signatures beside it. What is there already is not sent again.
    ///
    /// # Errors
    /// The registry refuses or fails; the tag then names what it named before.
    pub async fn push(&self, version: &Version, package: &Package) -> Result<(), Error> {
        let Package { config, component, manifest, signatures, .. } = package;
        self.put_blob("the component", component).await?;
        self.put_blob("the config", config).await?;
        self.put_manifest(version, manifest).await?;
        self.push_signatures(package.manifest_digest(), signatures).await
    }

    /// Adds signatures to those of a manifest.
    ///
    /// # Errors
    /// The registry refuses or fails.
    pub async fn push_signatures(&self, manifest: Digest, signatures: &[Signature]) -> Result<(), Error> {
        // cosign looks for those of this manifest; others stay with the file that they were made beside.
        let wanted = format!("sha256:{manifest}");
        let of_it = |signature: &&Signature| signature.is_of_manifest(&wanted);
        let signatures: Vec<_> = signatures.iter().filter(of_it).cloned().collect();
        if signatures.is_empty() {
            return Ok(());
        }
        let tag = Version::Tag(cosign::tag(manifest));
        let before = match self.manifest(&tag).await {
            Ok(bytes) => Some(Manifest::parse(&bytes)?),
            Err(Error::NotThere { .. }) => None,
            Err(error) => return Err(error),
        };
        for Signature { payload, .. } in &signatures {
            self.put_blob("a signature", payload).await?;
        }
        let (config, manifest) = cosign::image(before, &signatures);
        self.put_blob("the config of the signatures", &config).await?;
        self.put_manifest(&tag, &manifest).await
    }

    /// The signatures that cosign would find for a manifest; empty if nobody signed it.
    async fn signatures(&self, manifest: Digest) -> Result<Vec<Signature>, Error> {
        let bytes = match self.manifest(&Version::Tag(cosign::tag(manifest))).await {
            Ok(bytes) => bytes,
            Err(Error::NotThere { .. }) => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        let mut signatures = Vec::new();
        for layer in cosign::layers(&Manifest::parse(&bytes)?)? {
            let blob = self.get_blob("a signature", layer.payload, layer.size, PAYLOAD_BYTES_MAX as u64);
            let payload = blob.await?;
            signatures.push(layer.with(payload));
        }
        Ok(signatures)
    }

    async fn manifest(&self, version: &Version) -> Result<Vec<u8>, Error> {
        let what = format!("manifest {}", version.of(&self.repository));
        let get = |url: Url| self.http.get(url).header(ACCEPT, MANIFEST);
        let url = self.url(&format!("manifests/{version}"))?;
        let answer = self.expect(&what, &[StatusCode::OK], &|| get(url.clone())).await?;
        let bytes = self.read("the manifest", answer, DOCUMENT_BYTES_MAX).await?;
        if let Version::Digest(wanted) = version {
            check_digest("the manifest", *wanted, &bytes)?;
        }
        Ok(bytes)
    }

    async fn blob(&self, what: &'static str, blob: &Descriptor, limit: u64) -> Result<Vec<u8>, Error> {
        self.get_blob(what, blob.checked(what, limit)?, blob.size, limit).await
    }

    async fn get_blob(
        &self,
        what: &'static str,
        digest: Digest,
        size: u64,
        limit: u64,
    ) -> Result<Vec<u8>, Error> {
        let url = self.url(&format!("blobs/sha256:{digest}"))?;
        let name = format!("{what} sha256:{digest}");
        let answer = self.expect(&name, &[StatusCode::OK], &|| self.http.get(url.clone())).await?;
        let bytes = self.read(what, answer, size.min(limit)).await?;
        check_digest(what, digest, &bytes)?;
        Ok(bytes)
    }

    async fn put_blob(&self, what: &'static str, bytes: &[u8]) -> Result<(), Error> {
        let digest = format!("sha256:{}", Digest::of(bytes));
        let url = self.url(&format!("blobs/{digest}"))?;
        let known = [StatusCode::OK, StatusCode::NOT_FOUND];
        let head = self.send(&|| self.http.head(url.clone())).await?;
        if self.accept(what, &known, head).await?.status() == StatusCode::OK {
            return Ok(());
        }
        let url = self.url("blobs/uploads/")?;
        let started = self.expect(what, &[StatusCode::ACCEPTED], &|| self.http.post(url.clone())).await?;
        let location = started.headers().get(LOCATION).and_then(|at| at.to_str().ok());
        let location = location.and_then(|at| started.url().join(at).ok());
        let mut location = location.ok_or_else(|| {
            self.answer(what, started.status(), "it does not say where to send it".to_owned())
        })?;
        location.query_pairs_mut().append_pair("digest", &digest);
        let put = || {
            let put = self.http.put(location.clone()).header(CONTENT_TYPE, "application/octet-stream");
            put.body(bytes.to_vec())
        };
        self.expect(what, &[StatusCode::CREATED], &put).await.map(drop)
    }

    async fn put_manifest(&self, version: &Version, bytes: &[u8]) -> Result<(), Error> {
        let url = self.url(&format!("manifests/{version}"))?;
        let put = || self.http.put(url.clone()).header(CONTENT_TYPE, MANIFEST).body(bytes.to_vec());
        let what = format!("manifest {}", version.of(&self.repository));
        self.expect(&what, &[StatusCode::CREATED], &put).await.map(drop)
    }

    fn url(&self, path: &str) -> Result<Url, Error> {
        // Digests have a colon, which would make a scheme of what stands before it.
        self.base.join(&format!("./{path}")).map_err(|error| self.unreachable(error.to_string()))
    }

    /// Sends a request, and logs in and sends it again if the registry wants that.
    async fn send(&self, request: &dyn Fn() -> RequestBuilder) -> Result<Response, Error> {
        let answer = self.send_once(request()).await?;
        if answer.status() != StatusCode::UNAUTHORIZED {
            return Ok(answer);
        }
        let Some(challenge) = Challenge::of(answer.headers()) else { return Ok(answer) };
        self.log_in(challenge).await?;
        self.send_once(request()).await
    }

    async fn send_once(&self, request: RequestBuilder) -> Result<Response, Error> {
        let mut request = request.build().map_err(|error| self.unreachable(error.to_string()))?;
        // An upload may be sent elsewhere, whose business the login is not.
        let url = request.url();
        if url.origin() == self.base.origin()
            && let Some(header) = self.authorization.lock().header()
        {
            request.headers_mut().insert(AUTHORIZATION, header);
        }
        self.http.execute(request).await.map_err(|error| self.failed(&error))
    }

    async fn log_in(&self, challenge: Challenge) -> Result<(), Error> {
        let new = match challenge {
            Challenge::Basic => Authorization::basic(self.credential.as_ref()),
            Challenge::Bearer { realm, query } => {
                let realm = self.base.join(&realm).ok().filter(|url| self.plain || url.scheme() == "https");
                let mut realm =
                    realm.ok_or_else(|| self.unreachable("it sends to a login in the clear".into()))?;
                for (key, value) in &query {
                    realm.query_pairs_mut().append_pair(key, value);
                }
                let mut ask = self.http.request(Method::GET, realm);
                if let Some(Credential { username, password }) = &self.credential {
                    ask = ask.basic_auth(username, Some(password));
                }
                let answer = ask.send().await.map_err(|error| self.failed(&error))?;
                let answer = self.accept("the login", &[StatusCode::OK], answer).await?;
                let text = self.read("the answer to the login", answer, DOCUMENT_BYTES_MAX).await?;
                Authorization::token(&text)
            }
        };
        let denied = || Error::Denied { registry: self.name.clone(), what: "this without a login".into() };
        *self.authorization.lock() = new.ok_or_else(denied)?;
        Ok(())
    }

    async fn expect(
        &self,
        what: &str,
        status: &[StatusCode],
        request: &dyn Fn() -> RequestBuilder,
    ) -> Result<Response, Error> {
        let answer = self.send(request).await?;
        self.accept(what, status, answer).await
    }

    async fn accept(&self, what: &str, status: &[StatusCode], answer: Response) -> Result<Response, Error> {
        let got = answer.status();
        if status.contains(&got) {
            return Ok(answer);
        }
        let (registry, what) = (self.name.clone(), what.to_owned());
        match got {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Err(Error::Denied { registry, what }),
            StatusCode::NOT_FOUND => Err(Error::NotThere { registry, what }),
            _ => {
                let text = self.read("its answer", answer, DOCUMENT_BYTES_MAX).await.unwrap_or_default();
                Err(self.answer(&what, got, String::from_utf8_lossy(&text).into_owned()))
            }
        }
    }

    /// The whole of an answer of at most `limit` bytes. What is longer is not read to its end.
    async fn read(&self, what: &'static str, mut answer: Response, limit: u64) -> Result<Vec<u8>, Error> {
        let mut bytes = Vec::new();
        if let Some(said) = answer.content_length().filter(|said| *said > limit) {
            return Err(Error::TooLarge { what, bytes: said, limit });
        }
        while let Some(piece) = answer.chunk().await.map_err(|error| self.failed(&error))? {
            let read = (bytes.len() + piece.len()) as u64;
            if read > limit {
                return Err(Error::TooLarge { what, bytes: read, limit });
            }
            bytes.extend_from_slice(&piece);
        }
        Ok(bytes)
    }

    fn answer(&self, what: &str, status: StatusCode, text: String) -> Error {
        let (registry, text) = (self.name.clone(), printable(text.trim(), ERROR_BYTES));
        Error::Answer { registry, what: what.to_owned(), status: status.as_u16(), text }
    }

    fn unreachable(&self, reason: String) -> Error {
        Error::Unreachable { registry: self.name.clone(), reason: printable(&reason, ERROR_BYTES) }
    }

    /// The causes behind an error of the library, which alone say what happened.
    fn failed(&self, error: &reqwest::Error) -> Error {
        let mut reason = String::new();
        let mut cause: Option<&dyn std::error::Error> = Some(error);
        while let Some(error) = cause {
            let text = error.to_string();
            if !reason.contains(&text) {
                reason += if reason.is_empty() { "" } else { ": " };
                reason += &text;
            }
            cause = error.source();
        }
        // What a server without TLS makes of a handshake.
        if !self.plain && reason.contains("InvalidContentType") {
            return Error::Plain { registry: self.name.clone(), reason: printable(&reason, ERROR_BYTES) };
        }
        self.unreachable(reason)
    }
}

#[cfg(test)]
mod tests;
