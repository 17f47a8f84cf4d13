//! What tools ask of any gRPC server: health, and what it offers.

use crate::process::{Host, runtime};
use kvasir_client::control::{Control, ControlError};
use kvasir_proto as proto;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
use tonic_reflection::pb::v1::{ServerReflectionRequest, ServiceResponse};

fn block_on<R>(work: impl Future<Output = R>) -> R {
    runtime().block_on(work)
}

async fn connect(to: &str) -> Channel {
    Endpoint::from_shared(to.to_owned()).unwrap().connect().await.unwrap()
}

fn with_token<T>(message: T, token: &str) -> Request<T> {
    let mut request = Request::new(message);
    if !token.is_empty() {
        let header: MetadataValue<Ascii> = format!("Bearer {token}").parse().unwrap();
        request.metadata_mut().insert("authorization", header);
    }
    request
}

fn service(name: &str) -> HealthCheckRequest {
    HealthCheckRequest { service: name.to_owned() }
}

async fn drain(host: &Host, resume: bool) -> Result<(), ControlError> {
    let mut control = Control::connect(&host.control(), "").await?;
    control.node.drain(proto::DrainRequest { resume }).await?;
    Ok(())
}

#[test]
fn health_is_told_to_everyone_that_the_host_knows() {
    let dir = tempfile::tempdir().unwrap();
    let host = Host::start_with(dir.path(), &["listen.grpc=127.0.0.1:0"]);
    // A role that no call of health takes.
    let token = host.token_for(&["--role", "policy"]);
    block_on(async {
        let serving = ServingStatus::Serving as i32;
        let unix = format!("unix:{}", host.addr("control"));
        let mut health = HealthClient::new(connect(&unix).await);
        assert_eq!(health.check(service("")).await.unwrap().into_inner().status, serving);
        let tcp = format!("http://{}", host.addr("grpc"));
        let mut health = HealthClient::new(connect(&tcp).await);
        let refused = health.check(service("")).await.unwrap_err();
        assert_eq!(refused.code(), Code::PermissionDenied, "{refused}");
        for name in ["", "kvasir.v1.Store", "kvasir.v1.Conductor", "kvasir.v1.PolicyAdmin", "kvasir.v1.Node"]
        {
            let answer = health.check(with_token(service(name), &token)).await.unwrap();
            assert_eq!(answer.into_inner().status, serving, "{name:?}");
        }
        let unknown = health.check(with_token(service("kvasir.v9.Store"), &token)).await.unwrap_err();
        assert!(
            unknown.code() == Code::NotFound && unknown.message().contains("kvasir.v1.Store"),
            "{unknown}"
        );
        let mut watched = health.watch(with_token(service(""), &token)).await.unwrap().into_inner();
        assert_eq!(watched.message().await.unwrap().unwrap().status, serving);
        drain(&host, false).await.unwrap();
        assert_eq!(watched.message().await.unwrap().unwrap().status, ServingStatus::NotServing as i32);
        drain(&host, true).await.unwrap();
        assert_eq!(watched.message().await.unwrap().unwrap().status, serving);
        let mut strange = health.watch(with_token(service("x"), &token)).await.unwrap().into_inner();
        assert_eq!(strange.message().await.unwrap().unwrap().status, ServingStatus::ServiceUnknown as i32);
    });
}

/// The names of the services that the host lists.
async fn listed(to: &str, token: &str) -> Result<Vec<String>, tonic::Status> {
    let ask = ServerReflectionRequest {
        host: String::new(),
        message_request: Some(MessageRequest::ListServices(String::new())),
    };
    let mut reflection = ServerReflectionClient::new(connect(to).await);
    let asked = with_token(tokio_stream::once(ask), token);
    let answer = reflection.server_reflection_info(asked).await?.into_inner().message().await?.unwrap();
    let Some(MessageResponse::ListServicesResponse(list)) = answer.message_response else {
        panic!("no list: {answer:?}")
    };
    Ok(list.service.into_iter().map(|ServiceResponse { name }| name).collect())
}

#[test]
fn tools_learn_the_services_from_the_host() {
    let dir = tempfile::tempdir().unwrap();
    let host = Host::start_with(dir.path(), &["listen.grpc=127.0.0.1:0"]);
    let (observer, engine) = (host.token_for(&["--role", "observer"]), host.token_for(&["--role", "engine"]));
    block_on(async {
        let (unix, tcp) = (format!("unix:{}", host.addr("control")), format!("http://{}", host.addr("grpc")));
        for (to, token) in [(&unix, ""), (&tcp, observer.as_str())] {
            let names = listed(to, token).await.unwrap();
            for name in ["kvasir.v1.Store", "kvasir.v1.Node", "grpc.health.v1.Health"] {
                assert!(names.iter().any(|listed| listed == name), "{name} is not in {names:?}");
            }
        }
        for token in ["", &engine] {
            assert_eq!(listed(&tcp, token).await.unwrap_err().code(), Code::PermissionDenied);
        }
    });
}
