//! The role that each gRPC call and each HTTP page takes. A path that is not here is refused.

use kvasir_dataplane::server::access::Role;

/// What a caller needs to make a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Needs {
    /// Everyone that can reach the listener: whether the host lives is no secret, and probes carry no token.
    Nothing,
    /// Everyone that the host knows, whatever their roles.
    Identity,
    Role(Role),
}

use Needs::{Identity, Nothing};
use Role::{Engine, Observer, Operator, Policy, Router};

const TABLE: &[(&str, Needs)] = &[
    ("/kvasir.v1.Store/Exists", Needs::Role(Engine)),
    ("/kvasir.v1.Store/Stat", Needs::Role(Observer)),
    ("/kvasir.v1.Store/Remove", Needs::Role(Operator)),
    ("/kvasir.v1.Store/List", Needs::Role(Observer)),
    ("/kvasir.v1.Store/Usage", Needs::Role(Observer)),
    ("/kvasir.v1.Store/Push", Needs::Role(Engine)),
    ("/kvasir.v1.Store/Endpoints", Needs::Role(Engine)),
    ("/kvasir.v1.Conductor/Register", Needs::Role(Engine)),
    ("/kvasir.v1.Conductor/Unregister", Needs::Role(Engine)),
    ("/kvasir.v1.Conductor/ReportLoad", Needs::Role(Engine)),
    ("/kvasir.v1.Conductor/BlocksStored", Needs::Role(Engine)),
    ("/kvasir.v1.Conductor/BlocksRemoved", Needs::Role(Engine)),
    ("/kvasir.v1.Conductor/ResetBlocks", Needs::Role(Engine)),
    ("/kvasir.v1.Conductor/Schedule", Needs::Role(Router)),
    ("/kvasir.v1.Conductor/Complete", Needs::Role(Router)),
    ("/kvasir.v1.Conductor/Exchange", Needs::Role(Router)),
    ("/kvasir.v1.Conductor/LookupPrefix", Needs::Role(Router)),
    ("/kvasir.v1.PolicyAdmin/Load", Needs::Role(Policy)),
    ("/kvasir.v1.PolicyAdmin/Configure", Needs::Role(Policy)),
    ("/kvasir.v1.PolicyAdmin/Promote", Needs::Role(Policy)),
    ("/kvasir.v1.PolicyAdmin/Rollback", Needs::Role(Policy)),
    ("/kvasir.v1.PolicyAdmin/Pause", Needs::Role(Policy)),
    ("/kvasir.v1.PolicyAdmin/Resume", Needs::Role(Policy)),
    ("/kvasir.v1.PolicyAdmin/List", Needs::Role(Observer)),
    // A policy's code may be a trade secret.
    ("/kvasir.v1.PolicyAdmin/Fetch", Needs::Role(Operator)),
    ("/kvasir.v1.PolicyAdmin/Logs", Needs::Role(Observer)),
    ("/kvasir.v1.Explain/Decision", Needs::Role(Observer)),
    ("/kvasir.v1.Explain/Block", Needs::Role(Observer)),
    ("/kvasir.v1.PolicyAdmin/History", Needs::Role(Observer)),
    ("/kvasir.v1.PolicyRollouts/Start", Needs::Role(Policy)),
    ("/kvasir.v1.PolicyRollouts/Change", Needs::Role(Policy)),
    ("/kvasir.v1.PolicyRollouts/Follow", Needs::Role(Policy)),
    ("/kvasir.v1.PolicyRollouts/Fetch", Needs::Role(Policy)),
    ("/kvasir.v1.PolicyRollouts/List", Needs::Role(Observer)),
    ("/kvasir.v1.Node/Info", Needs::Role(Observer)),
    ("/kvasir.v1.Node/Drain", Needs::Role(Operator)),
    ("/kvasir.v1.Node/MoveClock", Needs::Role(Operator)),
    ("/kvasir.v1.Node/Ready", Needs::Role(Observer)),
    ("/kvasir.v1.Node/Peers", Needs::Role(Observer)),
    ("/grpc.health.v1.Health/Check", Identity),
    ("/grpc.health.v1.Health/Watch", Identity),
    ("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", Needs::Role(Observer)),
    ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", Needs::Role(Observer)),
    ("/livez", Nothing),
    ("/readyz", Nothing),
    ("/metrics", Needs::Role(Observer)),
];

/// What a path takes. `None` means that the path is not in the table, and nobody may call it.
pub fn needs(path: &str) -> Option<Needs> {
    TABLE.iter().find(|(known, _)| *known == path).map(|(_, needs)| *needs)
}

/// Whether a call changes the host for others, and so leaves a line in the audit log.
pub fn is_administrative(path: &str) -> bool {
    const READS: [&str; 5] = [
        "/kvasir.v1.PolicyAdmin/List",
        "/kvasir.v1.PolicyAdmin/Fetch",
        "/kvasir.v1.PolicyAdmin/Logs",
        "/kvasir.v1.PolicyRollouts/Follow",
        "/kvasir.v1.PolicyRollouts/Fetch",
    ];
    let changes = matches!(needs(path), Some(Needs::Role(Policy | Operator)));
    changes && !READS.contains(&path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use prost::Message;

    /// Every call of the contract and of gRPC's own services, as the files say.
    fn calls() -> Vec<String> {
        let sets = [
            kvasir_proto::DESCRIPTORS,
            tonic_health::pb::FILE_DESCRIPTOR_SET,
            tonic_reflection::pb::v1::FILE_DESCRIPTOR_SET,
            tonic_reflection::pb::v1alpha::FILE_DESCRIPTOR_SET,
        ];
        let files = sets.iter().flat_map(|set| prost_types::FileDescriptorSet::decode(*set).unwrap().file);
        let mut paths = Vec::new();
        for file in files {
            for service in &file.service {
                let name = format!("/{}.{}", file.package(), service.name());
                paths.extend(service.method.iter().map(|method| format!("{name}/{}", method.name())));
            }
        }
        paths
    }

    #[test]
    fn every_call_of_the_contract_has_a_role_and_nothing_else_has() {
        let calls = calls();
        assert!(calls.len() > 20, "{calls:?}");
        for call in &calls {
            let open = call.starts_with("/grpc.health.") && needs(call) == Some(Identity);
            assert!(open || matches!(needs(call), Some(Needs::Role(_))), "{call} has no role");
        }
        for (path, _) in TABLE.iter().filter(|(path, _)| path.matches('/').count() == 2) {
            assert!(calls.iter().any(|call| call == path), "{path} is no call");
        }
        assert_eq!(needs("/kvasir.v1.Store/Burn"), None);
    }

    #[test]
    fn changes_are_audited_and_reads_are_not() {
        for (path, audited) in [
            ("/kvasir.v1.PolicyAdmin/Load", true),
            ("/kvasir.v1.PolicyAdmin/Promote", true),
            ("/kvasir.v1.PolicyAdmin/History", false),
            ("/kvasir.v1.Node/Drain", true),
            ("/kvasir.v1.Store/Remove", true),
            ("/kvasir.v1.PolicyAdmin/List", false),
            ("/kvasir.v1.PolicyAdmin/Fetch", false),
            ("/kvasir.v1.Conductor/Schedule", false),
            ("/metrics", false),
        ] {
            assert_eq!(is_administrative(path), audited, "{path}");
        }
    }
}
