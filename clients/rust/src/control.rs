//! Control calls: what a host holds, which policies serve, and how it is doing. KV bytes never pass here.

use crate::proto;
use proto::conductor_client::ConductorClient;
use proto::node_client::NodeClient;
use proto::policy_admin_client::PolicyAdminClient;
use proto::store_client::StoreClient;
use std::time::Duration;
use tonic::transport::{Channel, Endpoint};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// To compile a large component takes tens of seconds, to push blocks as long as their transfer.
pub const CALL_TIMEOUT: Duration = Duration::from_secs(300);

/// Largest answer accepted. A page of blocks or a log ring stays well below.
pub const RESPONSE_BYTES_MAX: usize = 8 << 20;

/// Why a control call failed.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    #[error("cannot reach the host at {addr}: {reason}; is `kvasir serve` running there?")]
    Unreachable { addr: String, reason: String },
    /// The host's own words.
    #[error("{message}")]
    Refused { code: tonic::Code, message: String },
    #[error("the component is {bytes} B; the host accepts at most {max} B")]
    ComponentTooLarge { bytes: u64, max: u64 },
}

impl ControlError {
    /// Whether the same call may succeed later without a change by the caller.
    pub fn retryable(&self) -> bool {
        match self {
            Self::Unreachable { .. } => true,
            Self::Refused { code, .. } => {
                matches!(
                    code,
                    tonic::Code::Unavailable | tonic::Code::ResourceExhausted | tonic::Code::Aborted
                )
            }
            Self::ComponentTooLarge { .. } => false,
        }
    }
}

impl From<tonic::Status> for ControlError {
    fn from(status: tonic::Status) -> Self {
        Self::Refused { code: status.code(), message: status.message().to_owned() }
    }
}

/// Where the code of a policy comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PolicySource {
    Builtin(String),
    Component { name: String, bytes: Vec<u8> },
}

/// The services of one host over one connection. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Control {
    pub store: StoreClient<Channel>,
    pub conductor: ConductorClient<Channel>,
    pub policy: PolicyAdminClient<Channel>,
    pub node: NodeClient<Channel>,
}

impl Control {
    /// `addr` is a socket address, or a name and port: `host.example:7420`.
    ///
    /// # Errors
    /// Nobody listens there, or not within five seconds.
    pub async fn connect(addr: impl std::fmt::Display) -> Result<Self, ControlError> {
        Self::connect_with(addr, CALL_TIMEOUT).await
    }

    /// As [`Control::connect`]; a call that has no answer after `call_timeout` fails.
    ///
    /// # Errors
    /// As [`Control::connect`].
    pub async fn connect_with(
        addr: impl std::fmt::Display,
        call_timeout: Duration,
    ) -> Result<Self, ControlError> {
        let addr = addr.to_string();
        if addr.rsplit_once(':').is_none_or(|(host, port)| host.is_empty() || port.parse::<u16>().is_err()) {
            let reason = "it is not ADDRESS:PORT or NAME:PORT".to_owned();
            return Err(ControlError::Unreachable { addr, reason });
        }
        let unreachable = |e: tonic::transport::Error| ControlError::Unreachable {
            addr: addr.clone(),
            reason: innermost(&e),
        };
        let endpoint = Endpoint::try_from(format!("http://{addr}")).map_err(unreachable)?;
        let channel = endpoint
            .connect_timeout(CONNECT_TIMEOUT)
            .timeout(call_timeout)
            .tcp_nodelay(true)
            .connect()
            .await
            .map_err(unreachable)?;
        Ok(Self {
            store: StoreClient::new(channel.clone()).max_decoding_message_size(RESPONSE_BYTES_MAX),
            conductor: ConductorClient::new(channel.clone()).max_decoding_message_size(RESPONSE_BYTES_MAX),
            policy: PolicyAdminClient::new(channel.clone()).max_decoding_message_size(RESPONSE_BYTES_MAX),
            node: NodeClient::new(channel).max_decoding_message_size(RESPONSE_BYTES_MAX),
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
        use proto::load_request::Source;
        let (name, source) = match source {
            PolicySource::Builtin(name) => (name.clone(), Source::Builtin(name)),
            PolicySource::Component { name, bytes } => {
                self.check_component_size(bytes.len() as u64).await?;
                (name, Source::Component(bytes.into()))
            }
        };
        let settings =
            settings.iter().map(|(name, value)| proto::Setting { name: name.clone(), value: value.clone() });
        let request = proto::LoadRequest {
            slot: slot.into(),
            name,
            source: Some(source),
            settings: settings.collect(),
        };
        Ok(self.policy.load(request).await?.into_inner().policy.unwrap_or_default())
    }

    /// A component over the host's limit would be cut off mid-stream with an error about messages.
    async fn check_component_size(&mut self, bytes: u64) -> Result<(), ControlError> {
        let max = self.policy.list(proto::ListPoliciesRequest {}).await?.into_inner().component_bytes_max;
        if bytes > max { Err(ControlError::ComponentTooLarge { bytes, max }) } else { Ok(()) }
    }
}

/// The root cause: tonic's own text is only "transport error".
fn innermost(error: &dyn std::error::Error) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}
