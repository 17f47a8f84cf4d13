//! Any message gets an answer, or a refusal that names the field at fault.

use crate::process::Host;
use kvasir_proto as proto;
use proptest::prelude::*;
use prost::Message;
use prost::bytes::{Buf, BufMut};
use prost::encoding::{WireType, encode_key, encode_varint};
use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{DescriptorProto, FileDescriptorSet};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use tonic::Code;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};

/// Long enough on a busy machine for everything but a call that hangs.
const PATIENCE: Duration = Duration::from_secs(120);

/// The contract: its messages by name, and the request of each call by path.
struct Contract {
    messages: BTreeMap<String, DescriptorProto>,
    calls: Vec<(String, String)>,
}

impl Contract {
    fn read() -> Self {
        let files = FileDescriptorSet::decode(proto::DESCRIPTORS).unwrap().file;
        let (mut messages, mut calls) = (BTreeMap::new(), Vec::new());
        for file in files.iter().filter(|file| file.package() == "kvasir.v1") {
            for message in &file.message_type {
                messages.insert(format!(".kvasir.v1.{}", message.name()), message.clone());
            }
            for service in &file.service {
                let name = service.name();
                calls.extend(service.method.iter().map(|method| {
                    (format!("/kvasir.v1.{name}/{}", method.name()), method.input_type().to_owned())
                }));
            }
        }
        Self { messages, calls }
    }

    /// Names of the fields of a message, and of those within.
    fn fields(&self, message: &str, names: &mut BTreeSet<String>) {
        for field in self.messages.get(message).into_iter().flat_map(|message| &message.field) {
            if names.insert(field.name().to_owned()) {
                self.fields(field.type_name(), names);
            }
        }
    }

    fn message(&self, name: &str, chance: &mut Chance, depth: u32) -> Vec<u8> {
        let mut bytes = Vec::new();
        for field in &self.messages[name].field {
            let repeated = field.label() == Label::Repeated;
            let count =
                if repeated { chance.of(&[0, 1, 2, 5, 200]) } else { u64::from(chance.of(&[0, 1, 1]) == 1) };
            for _ in 0..if depth > 1 { count.min(3) } else { count } {
                self.value(field, &mut bytes, chance, depth);
            }
        }
        bytes
    }

    fn value(
        &self,
        field: &prost_types::FieldDescriptorProto,
        bytes: &mut Vec<u8>,
        chance: &mut Chance,
        depth: u32,
    ) {
        let number = field.number() as u32;
        let numbers = [0, 1, 2, 7, 100, 65_536, i32::MAX as u64, u32::MAX.into(), i64::MAX as u64, u64::MAX];
        let mut text = |content: Vec<u8>| {
            encode_key(number, WireType::LengthDelimited, bytes);
            encode_varint(content.len() as u64, bytes);
            bytes.put_slice(&content);
        };
        match field.r#type() {
            Type::Message if !self.messages.contains_key(field.type_name()) => {}
            Type::Message => text(self.message(field.type_name(), chance, depth + 1)),
            Type::String => {
                let long = "x".repeat(300);
                let words =
                    ["", "a", "bad name\n", "../..", "evictor", "scheduler", "lru", "é\u{202e}", &long];
                text(words[chance.below(words.len())].as_bytes().to_vec());
            }
            Type::Bytes => text(vec![7; chance.of(&[0, 1, 8, 15, 16, 16, 16, 17, 32, 5000]) as usize]),
            Type::Double => {
                encode_key(number, WireType::SixtyFourBit, bytes);
                let values = [0.0, 1.0, 0.5, -1.0, 1e308, f64::INFINITY, f64::NAN];
                bytes.put_f64_le(values[chance.below(values.len())]);
            }
            Type::Float => {
                encode_key(number, WireType::ThirtyTwoBit, bytes);
                let values = [0.0, 1.0, 0.5, -1.0, f32::MAX, f32::INFINITY, f32::NAN];
                bytes.put_f32_le(values[chance.below(values.len())]);
            }
            Type::Fixed64 | Type::Sfixed64 => {
                encode_key(number, WireType::SixtyFourBit, bytes);
                bytes.put_u64_le(chance.of(&numbers));
            }
            Type::Fixed32 | Type::Sfixed32 => {
                encode_key(number, WireType::ThirtyTwoBit, bytes);
                bytes.put_u32_le(chance.of(&numbers) as u32);
            }
            _ => {
                encode_key(number, WireType::Varint, bytes);
                encode_varint(chance.of(&numbers), bytes);
            }
        }
    }
}

/// Choices that a seed makes (SplitMix64).
struct Chance(u64);

impl Chance {
    fn below(&mut self, count: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % count as u64) as usize
    }

    fn of(&mut self, values: &[u64]) -> u64 {
        values[self.below(values.len())]
    }
}

/// Messages as bytes; of answers only that there is one.
#[derive(Default)]
struct Raw;

impl Codec for Raw {
    type Encode = Vec<u8>;
    type Decode = ();
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Raw {
    type Item = Vec<u8>;
    type Error = tonic::Status;

    fn encode(&mut self, item: Vec<u8>, buffer: &mut EncodeBuf<'_>) -> Result<(), tonic::Status> {
        buffer.put_slice(&item);
        Ok(())
    }
}

impl Decoder for Raw {
    type Item = ();
    type Error = tonic::Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<()>, tonic::Status> {
        buffer.advance(buffer.remaining());
        Ok(Some(()))
    }
}

#[test]
fn any_message_gets_an_answer_or_a_refusal_that_names_the_field() {
    let dir = tempfile::tempdir().unwrap();
    let host = Host::start_with(dir.path(), &["listen.grpc=127.0.0.1:0"]);
    let (contract, token) = (Contract::read(), host.token());
    assert!(contract.calls.len() > 20);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let endpoint = tonic::transport::Endpoint::new(format!("http://{}", host.addr("grpc"))).unwrap();
    let channel = runtime.block_on(endpoint.connect()).unwrap();
    let call = |path: &str, message: Vec<u8>| {
        let mut request = tonic::Request::new(message);
        request.metadata_mut().insert("authorization", format!("Bearer {token}").parse().unwrap());
        runtime.block_on(async {
            let mut client = tonic::client::Grpc::new(channel.clone());
            client.ready().await.unwrap();
            let answer = client.unary(request, path.parse().unwrap(), Raw);
            tokio::time::timeout(PATIENCE, answer).await
        })
    };
    let config = ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() };
    proptest!(config, |(seed: u64)| {
        for (path, input) in &contract.calls {
            let message = contract.message(input, &mut Chance(seed), 0);
            let answer = call(path, message).map_err(|_| TestCaseError::fail(format!("{path} hangs")))?;
            let Err(status) = answer else { continue };
            let (code, text) = (status.code(), status.message());
            let expected = [
                Code::InvalidArgument, Code::NotFound, Code::FailedPrecondition, Code::AlreadyExists,
                Code::ResourceExhausted, Code::Unavailable,
            ];
            prop_assert!(expected.contains(&code), "{path}: {code:?}: {text}");
            if code == Code::InvalidArgument {
                let mut names = BTreeSet::new();
                contract.fields(input, &mut names);
                prop_assert!(names.iter().any(|name| text.contains(name.as_str())), "{path}: `{text}` names no field");
            }
        }
    });
    host.check(&["policy", "list"], b"", 0, "evictor");
}
