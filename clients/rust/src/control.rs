//! Control calls: what a host holds, which policies serve, and how it is doing. KV bytes never pass here.

use crate::proto;
use hyper_util::rt::TokioIo;
use proto::conductor_client::ConductorClient;
use proto::explain_client::ExplainClient;
use proto::node_client::NodeClient;
use proto::policy_admin_client::PolicyAdminClient;
use proto::policy_rollouts_client::PolicyRolloutsClient;
use proto::store_client::StoreClient;
use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;
use std::{fmt, io};
use tokio::net::UnixStream;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Channel, Endpoint};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Compiling a large component takes tens of seconds, and pushing blocks as long as their transfer.
pub const CALL_TIMEOUT: Duration = Duration::from_secs(300);

/// Largest answer accepted. A page of blocks or a log ring stays well below.
pub const RESPONSE_BYTES_MAX: usize = 8 << 20;

/// Largest component that a host may have been allowed, and what is around it.
pub const COMPONENT_BYTES_MAX: usize = 1025 << 20;

/// Why a control call failed.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    #[error("cannot reach the host at {addr}: {reason}; is `kvasir serve` running there?")]
    Unreachable { addr: String, reason: String },
    #[error("{addr} is closed to this user; {}", crate::WHO_MAY)]
    NotAllowed { addr: String },
    /// The host's own words.
    #[error("{message}")]
    Refused { code: tonic::Code, message: String },
    #[error(
        "the connection to the host was lost before it answered ({reason}); ask it whether the call was carried out"
    )]
    Lost { reason: String },
    #[error("{text:?} is no control address; write unix:PATH or HOST:PORT")]
    Address { text: String },
    #[error("the token has characters that no token has; copy it again, without line ends")]
    Token,
    #[error("the component is {bytes} B; the host accepts at most {max} B")]
    ComponentTooLarge { bytes: u64, max: u64 },
}

impl ControlError {
    /// Whether the same call may succeed later without a change by the caller.
    pub fn retryable(&self) -> bool {
        match self {
            Self::Unreachable { .. } | Self::Lost { .. } => true,
            Self::Refused { code, .. } => {
                matches!(
                    code,
                    tonic::Code::Unavailable | tonic::Code::ResourceExhausted | tonic::Code::Aborted
                )
            }
            Self::NotAllowed { .. } | Self::ComponentTooLarge { .. } | Self::Address { .. } | Self::Token => {
                false
            }
        }
    }
}

impl From<tonic::Status> for ControlError {
    fn from(status: tonic::Status) -> Self {
        match lost(&status) {
            Some(source) => Self::Lost { reason: chain(source) },
            None => Self::Refused { code: status.code(), message: status.message().to_owned() },
        }
    }
}

/// What broke the connection of a call. Errors that a host answers with have no source. The end of a connection has one, and one of
/// two codes: which, depends on whether the request had been sent. So has a call whose time is over, but nothing broke.
fn lost(status: &tonic::Status) -> Option<&(dyn std::error::Error + 'static)> {
    let source = std::error::Error::source(status)?;
    let mut causes = std::iter::successors(Some(source), |error| error.source());
    let is_late = causes.any(|cause| cause.is::<tonic::TimeoutExpired>());
    let is_broken = matches!(status.code(), tonic::Code::Unknown | tonic::Code::Cancelled);
    (is_broken && !is_late).then_some(source)
}

/// An error and its causes. The error of a transport does not say by itself what happened; its causes do.
fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

/// Where the code of a policy comes from.
#[derive(Clone, Debug, PartialEq)]
pub enum PolicySource {
    Builtin(String),
    Component {
        name: String,
        bytes: Vec<u8>,
    },
    /// A component with the signatures that came with it, of which a host may want one.
    Signed {
        name: String,
        bytes: Vec<u8>,
        signatures: Vec<proto::PolicySignature>,
    },
    /// Several schedulers that decide together.
    Chain {
        name: String,
        parts: Vec<proto::ChainPart>,
    },
}

impl PolicySource {
    /// Bytes of all its components.
    fn bytes(&self) -> u64 {
        let of_part = |part: &proto::ChainPart| match &part.source {
            Some(proto::chain_part::Source::Component(bytes)) => bytes.len() as u64,
            _ => 0,
        };
        match self {
            Self::Builtin(_) => 0,
            Self::Component { bytes, .. } | Self::Signed { bytes, .. } => bytes.len() as u64,
            Self::Chain { parts, .. } => parts.iter().map(of_part).sum(),
        }
    }
}

/// What a policy is loaded for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PolicyStage {
    /// It decides.
    #[default]
    Active,
    /// It is asked beside the active policy, and decides nothing.
    Shadow,
    /// It decides this many of a thousand sessions, or of prompts where requests name no session.
    CanaryPerMille(u32),
    /// It decides the requests of the tenant of this number.
    CanaryTenant(u32),
}

impl From<PolicyStage> for proto::Stage {
    fn from(stage: PolicyStage) -> Self {
        use proto::stage::{Kind, Share};
        let (kind, share) = match stage {
            PolicyStage::Active => (Kind::Active, None),
            PolicyStage::Shadow => (Kind::Shadow, None),
            PolicyStage::CanaryPerMille(share) => (Kind::Canary, Some(Share::PerMille(share))),
            PolicyStage::CanaryTenant(tenant) => (Kind::Canary, Some(Share::Tenant(tenant))),
        };
        Self { kind: kind.into(), share }
    }
}

/// Where a host takes control calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ControlAddr {
    /// A Unix socket on this machine; the host knows its callers by the kernel's word.
    Unix(PathBuf),
    /// Over TCP, where a caller shows a token. A name or an address, and a port.
    Tcp(String),
}

impl ControlAddr {
    /// Whether what is said there stays on this machine, so that nobody can read what is not encrypted. Of names, only
    /// `localhost` is known.
    pub fn is_on_this_machine(&self) -> bool {
        let Self::Tcp(addr) = self else { return true };
        let host = addr.rsplit_once(':').map_or(&**addr, |(host, _)| host).trim_matches(['[', ']']);
        host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
    }
}

impl FromStr for ControlAddr {
    type Err = ControlError;

    fn from_str(text: &str) -> Result<Self, ControlError> {
        if let Some(path) = text.strip_prefix("unix:") {
            return Ok(Self::Unix(path.into()));
        }
        let text = text.strip_prefix("tcp:").unwrap_or(text);
        match text.rsplit_once(':') {
            Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok() => {
                Ok(Self::Tcp(text.to_owned()))
            }
            _ => Err(ControlError::Address { text: text.to_owned() }),
        }
    }
}

impl fmt::Display for ControlAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(addr) => f.write_str(addr),
        }
    }
}

/// Adds the caller's token to each call.
#[derive(Clone, Debug)]
pub struct Bearer(Option<MetadataValue<Ascii>>);

impl Interceptor for Bearer {
    fn call(&mut self, mut request: tonic::Request<()>) -> Result<tonic::Request<()>, tonic::Status> {
        if let Some(token) = &self.0 {
            request.metadata_mut().insert("authorization", token.clone());
        }
        Ok(request)
    }
}

/// A connection that shows a token.
pub type Calls = InterceptedService<Channel, Bearer>;

/// The services of one host over one connection. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Control {
    pub store: StoreClient<Calls>,
    pub conductor: ConductorClient<Calls>,
    pub policy: PolicyAdminClient<Calls>,
    pub rollouts: PolicyRolloutsClient<Calls>,
    pub node: NodeClient<Calls>,
    pub explain: ExplainClient<Calls>,
}

impl Control {
    /// With a `token` (empty: none), which a host asks for over TCP alone.
    ///
    /// # Errors
    /// Nobody listens there, or not within five seconds; or the token has characters that no token has.
    pub async fn connect(addr: &ControlAddr, token: &str) -> Result<Self, ControlError> {
        Self::connect_with(addr, token, CALL_TIMEOUT).await
    }

    /// As [`Control::connect`]; a call that has no answer after `call_timeout` fails.
    ///
    /// # Errors
    /// As [`Control::connect`].
    pub async fn connect_with(
        addr: &ControlAddr,
        token: &str,
        call_timeout: Duration,
    ) -> Result<Self, ControlError> {
        let uri = match addr {
            // The name goes nowhere: the connector below opens the socket.
            ControlAddr::Unix(_) => "http://kvasir".to_owned(),
            ControlAddr::Tcp(addr) => format!("http://{addr}"),
        };
        let endpoint = endpoint(&uri, call_timeout).map_err(|error| unreachable(addr, &error))?;
        let channel = match addr {
            ControlAddr::Tcp(_) => endpoint.connect().await,
            ControlAddr::Unix(path) => {
                let path = path.clone();
                let open = move |_| {
                    let path = path.clone();
                    async { Ok::<_, io::Error>(TokioIo::new(UnixStream::connect(path).await?)) }
                };
                endpoint.connect_with_connector(tower::service_fn(open)).await
            }
        };
        Self::over(channel.map_err(|error| unreachable(addr, &error))?, token)
    }

    /// Over TLS, to a `HOST:PORT`.
    ///
    /// # Errors
    /// As [`Control::connect`]; also if either side refuses the other's certificate.
    #[cfg(feature = "control-tls")]
    pub async fn connect_tls(
        to: &str,
        token: &str,
        tls: &kvasir_tls::ClientTls,
    ) -> Result<Self, ControlError> {
        let addr = ControlAddr::Tcp(to.to_owned());
        let connector = tokio_rustls::TlsConnector::from(std::sync::Arc::clone(tls.config()));
        let (name, target) = (tls.name().clone(), to.to_owned());
        let open = move |_| {
            let (connector, name, target) = (connector.clone(), name.clone(), target.clone());
            async move {
                let stream = tokio::net::TcpStream::connect(target).await?;
                Ok::<_, io::Error>(TokioIo::new(connector.connect(name, stream).await?))
            }
        };
        let uri = format!("http://{to}");
        let endpoint = endpoint(&uri, CALL_TIMEOUT).map_err(|error| unreachable(&addr, &error))?;
        let channel = endpoint.connect_with_connector(tower::service_fn(open)).await;
        Self::over(channel.map_err(|error| unreachable(&addr, &error))?, token)
    }

    fn over(channel: Channel, token: &str) -> Result<Self, ControlError> {
        let bearer = match token {
            "" => Bearer(None),
            token => Bearer(Some(format!("Bearer {token}").parse().map_err(|_| ControlError::Token)?)),
        };
        let calls = InterceptedService::new(channel, bearer);
        Ok(Self {
            store: StoreClient::new(calls.clone()).max_decoding_message_size(RESPONSE_BYTES_MAX),
            conductor: ConductorClient::new(calls.clone()).max_decoding_message_size(RESPONSE_BYTES_MAX),
            policy: PolicyAdminClient::new(calls.clone()).max_decoding_message_size(COMPONENT_BYTES_MAX),
            explain: ExplainClient::new(calls.clone()).max_decoding_message_size(RESPONSE_BYTES_MAX),
            rollouts: PolicyRolloutsClient::new(calls.clone()).max_decoding_message_size(COMPONENT_BYTES_MAX),
            node: NodeClient::new(calls).max_decoding_message_size(RESPONSE_BYTES_MAX),
        })
    }

    /// Puts a policy into service.
    ///
    /// # Errors
    /// The host refuses it; its policy in service is untouched.
    pub async fn load_policy(
        &mut self,
        slot: &str,
        source: PolicySource,
        settings: &[(String, String)],
    ) -> Result<proto::Policy, ControlError> {
        self.load_policy_as(slot, source, settings, PolicyStage::Active).await
    }

    /// Puts a policy into service, or on trial beside the one that serves.
    ///
    /// # Errors
    /// As [`Control::load_policy`].
    pub async fn load_policy_as(
        &mut self,
        slot: &str,
        source: PolicySource,
        settings: &[(String, String)],
        stage: PolicyStage,
    ) -> Result<proto::Policy, ControlError> {
        let request = self.load_request(slot, source, settings, stage).await?;
        Ok(self.policy.load(request).await?.into_inner().policy.unwrap_or_default())
    }

    /// What a host needs to bring a policy into service.
    ///
    /// # Errors
    /// It is larger than the host accepts.
    pub async fn load_request(
        &mut self,
        slot: &str,
        source: PolicySource,
        settings: &[(String, String)],
        stage: PolicyStage,
    ) -> Result<proto::LoadRequest, ControlError> {
        use proto::load_request::Source;
        self.check_component_size(source.bytes()).await?;
        let (name, source, signatures) = match source {
            PolicySource::Builtin(name) => (name.clone(), Source::Builtin(name), Vec::new()),
            PolicySource::Component { name, bytes } => (name, Source::Component(bytes.into()), Vec::new()),
            PolicySource::Signed { name, bytes, signatures } => {
                (name, Source::Component(bytes.into()), signatures)
            }
            PolicySource::Chain { name, parts } => (name, Source::Chain(proto::Chain { parts }), Vec::new()),
        };
        Ok(proto::LoadRequest {
            slot: slot.into(),
            name,
            source: Some(source),
            settings: self::settings(settings),
            stage: Some(stage.into()),
            signatures,
        })
    }

    /// Loads what serves a slot once more, with some settings changed and some, by name, back at their defaults.
    ///
    /// # Errors
    /// The host or the policy refuses them; what serves is untouched.
    pub async fn configure_policy(
        &mut self,
        slot: &str,
        set: &[(String, String)],
        unset: Vec<String>,
        stage: PolicyStage,
    ) -> Result<proto::Policy, ControlError> {
        let set = settings(set);
        let request = proto::ConfigureRequest { slot: slot.into(), set, unset, stage: Some(stage.into()) };
        Ok(self.policy.configure(request).await?.into_inner().policy.unwrap_or_default())
    }

    /// A component over the host's limit would be cut off mid-stream with an error about messages.
    async fn check_component_size(&mut self, bytes: u64) -> Result<(), ControlError> {
        if bytes == 0 {
            return Ok(());
        }
        let max = self.policy.list(proto::ListPoliciesRequest {}).await?.into_inner().component_bytes_max;
        if bytes > max { Err(ControlError::ComponentTooLarge { bytes, max }) } else { Ok(()) }
    }
}

fn settings(settings: &[(String, String)]) -> Vec<proto::Setting> {
    let setting =
        |(name, value): &(String, String)| proto::Setting { name: name.clone(), value: value.clone() };
    settings.iter().map(setting).collect()
}

fn endpoint(uri: &str, call_timeout: Duration) -> Result<Endpoint, tonic::transport::Error> {
    let endpoint = Endpoint::try_from(uri.to_owned())?;
    Ok(endpoint.connect_timeout(CONNECT_TIMEOUT).timeout(call_timeout).tcp_nodelay(true))
}

fn unreachable(addr: &ControlAddr, error: &tonic::transport::Error) -> ControlError {
    let (addr, cause) = (addr.to_string(), innermost(error));
    let kind = cause.downcast_ref::<io::Error>().map(io::Error::kind);
    if kind == Some(io::ErrorKind::PermissionDenied) {
        ControlError::NotAllowed { addr }
    } else {
        ControlError::Unreachable { addr, reason: cause.to_string() }
    }
}

/// The root cause: tonic's own text is only "transport error".
fn innermost<'a>(error: &'a (dyn std::error::Error + 'static)) -> &'a (dyn std::error::Error + 'static) {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    /// Answers the first bytes of a connection with HTTP/2's settings, and closes it after `reads` reads, or when nothing more comes: what is
    /// sent apart may arrive together.
    async fn host_that_goes(listener: tokio::net::TcpListener, reads: usize) {
        let (mut stream, _) = listener.accept().await.unwrap();
        stream.write_all(&[0, 0, 0, 4, 0, 0, 0, 0, 0]).await.unwrap();
        let mut buffer = [0; 4096];
        for _ in 0..reads {
            let read = tokio::time::timeout(Duration::from_millis(200), stream.read(&mut buffer)).await;
            if !matches!(read, Ok(Ok(1..))) {
                return;
            }
        }
    }

    #[tokio::test]
    async fn a_socket_that_this_user_may_not_open_is_told_from_one_that_is_not_there() {
        let connect = async |kind: io::ErrorKind| {
            let open = move |_| async move { Err::<TokioIo<UnixStream>, _>(io::Error::from(kind)) };
            let endpoint = endpoint("http://kvasir", CALL_TIMEOUT).unwrap();
            let failed = endpoint.connect_with_connector(tower::service_fn(open)).await.unwrap_err();
            unreachable(&ControlAddr::Unix("/run/control.sock".into()), &failed)
        };
        let closed = connect(io::ErrorKind::PermissionDenied).await;
        assert!(!closed.retryable() && closed.to_string().contains("closed to this user"), "{closed}");
        let absent = connect(io::ErrorKind::NotFound).await;
        assert!(
            absent.retryable() && absent.to_string().contains("is `kvasir serve` running there"),
            "{absent}"
        );
    }

    #[tokio::test]
    async fn a_host_that_goes_during_a_call_is_told_from_one_that_refuses() {
        for reads in [1, 2, 3] {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            let addr = ControlAddr::Tcp(listener.local_addr().unwrap().to_string());
            let host = tokio::spawn(host_that_goes(listener, reads));
            let mut control = Control::connect(&addr, "").await.unwrap();
            let call = control.policy.logs(proto::LogsRequest::default());
            let answer = tokio::time::timeout(Duration::from_secs(60), call).await.unwrap();
            let error = ControlError::from(answer.unwrap_err());
            println!("after {reads} reads: {error:?}");
            assert!(error.retryable(), "after {reads} reads: {error:?}");
            host.abort();
        }
        let mut not_sent = tonic::Status::cancelled("operation was canceled");
        not_sent.set_source(Arc::new(std::io::Error::other("connection closed")));
        assert!(ControlError::from(not_sent).retryable(), "it went before the request was on its way");
        let refused = ControlError::from(tonic::Status::unknown("the host's own words"));
        assert!(!refused.retryable() && refused.to_string() == "the host's own words");
    }
}
