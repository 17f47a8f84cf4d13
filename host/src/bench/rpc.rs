//! What a router's calls cost a host over gRPC, beside a bare tonic server that answers with as many bytes.

use super::{Row, thread_cpu_time};
use crate::config::Config;
use crate::daemon::Daemon;
use anyhow::{Context as _, Result, bail};
use hdrhistogram::Histogram;
use kvasir_client::control::{Calls, Control, ControlAddr};
use kvasir_proto::{
    self as proto, complete_request::Stage, exchange_request, exchange_response::answer::Answer,
};
use proto::conductor_client::ConductorClient;
use proto::conductor_server::SERVICE_NAME;
use proto::exchange_request::call::Call;
use rustix::time::{ClockId, clock_gettime};
use std::convert::Infallible;
use std::future::{Ready, ready};
use std::path::Path;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tonic::body::Body;
use tonic::codegen::{BoxFuture, Service, http};
use tonic::server::{Grpc, NamedService, UnaryService};

use tonic::{Request, Response, Status};
use tonic_prost::ProstCodec;

/// Blocks of a prompt.
const BLOCKS: u64 = 256;
const BLOCK_TOKENS: u32 = 16;
/// Requests of one message of the batch.
const BATCH: usize = 16;
const NAME: &str = "bench";

/// How much is measured.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    pairs: usize,
}

impl Size {
    pub const FULL: Self = Self { pairs: 20_000 };
    /// Shows that every row runs, measures nothing.
    pub const SMOKE: Self = Self { pairs: 64 };
}

/// A pair is one `Schedule` with 256 hashes and the `Complete` that ends it. Values are the processor time of all threads but
/// the caller's, p50 and p99 the time that the caller waits.
///
/// # Errors
/// The host does not start, or refuses a call.
pub fn rows(size: Size) -> Result<Vec<Row>> {
    let folder = tempfile::tempdir().context("a temporary folder")?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let running = Daemon::start(config(folder.path())?)?;
    let control = ControlAddr::Unix(running.control_path().into());
    let mut conductor = runtime.block_on(Control::connect(&control, ""))?.conductor;
    runtime.block_on(register(&mut conductor))?;

    let echo = Echo::start(&folder.path().join("echo.sock"))?;
    let mut bare = runtime.block_on(Control::connect(&echo.addr, ""))?.conductor;
    let pair = measure(size.pairs, || runtime.block_on(one(&mut conductor)))?;
    let reference = measure(size.pairs, || runtime.block_on(one(&mut bare)))?;
    let mut rows = vec![pair.row("rpc/schedule", 1).beside(reference.us(1))];
    for (name, batch) in [("rpc/exchange/1", 1), ("rpc/exchange/16", BATCH)] {
        let mut stream = runtime.block_on(Talk::open(&mut conductor))?;
        let times = measure(size.pairs / batch, || runtime.block_on(stream.turn(batch)))?;
        rows.push(times.row(name, batch).beside(reference.us(1)));
    }
    drop(echo);
    running.shutdown();
    Ok(rows)
}

fn config(folder: &Path) -> Result<Config> {
    let set = [
        format!("node.data_dir={}", folder.display()),
        "listen.http=127.0.0.1:0".into(),
        "store.pool_bytes=8MiB".into(),
        format!("conductor.block_size_tokens={BLOCK_TOKENS}"),
        "conductor.instance_ttl=1h".into(),
    ];
    Ok(Config::load(None, [], &set)?)
}

async fn register(conductor: &mut ConductorClient<Calls>) -> Result<()> {
    for n in 0..8 {
        let name = format!("engine-{n}");
        let instance = proto::RegisterRequest {
            name: name.clone(),
            prefill: true,
            decode: true,
            capacity_blocks: 1 << 20,
            ..Default::default()
        };
        let epoch = conductor.register(instance).await?.into_inner().epoch;
        let blocks = (1..=BLOCKS / 8 * (n + 1)).collect();
        let stored = proto::BlocksStoredRequest { name, epoch, sequence: 1, blocks, ..Default::default() };
        conductor.blocks_stored(stored).await?;
    }
    Ok(())
}

fn ask() -> proto::ScheduleRequest {
    let prompt_tokens = BLOCKS as u32 * BLOCK_TOKENS;
    proto::ScheduleRequest { prompt_tokens, blocks: (1..=BLOCKS).collect(), ..Default::default() }
}

fn finished(request_id: u64) -> proto::CompleteRequest {
    proto::CompleteRequest { request_id, stage: Stage::Finished.into(), ..Default::default() }
}

async fn one(conductor: &mut ConductorClient<Calls>) -> Result<()> {
    let scheduled = conductor.schedule(ask()).await?.into_inner();
    conductor.complete(finished(scheduled.request_id)).await?;
    Ok(())
}

/// An open stream of calls.
struct Talk {
    calls: tokio::sync::mpsc::Sender<proto::ExchangeRequest>,
    answers: tonic::Streaming<proto::ExchangeResponse>,
    open: Vec<u64>,
}

impl Talk {
    async fn open(conductor: &mut ConductorClient<Calls>) -> Result<Self> {
        let (calls, stream) = tokio::sync::mpsc::channel(1);
        let answers = conductor.exchange(ReceiverStream::new(stream)).await?.into_inner();
        Ok(Self { calls, answers, open: Vec::new() })
    }

    /// Ends the requests of the last message and asks for as many again.
    async fn turn(&mut self, batch: usize) -> Result<()> {
        let ended = self.open.drain(..).map(|id| Call::Complete(finished(id)));
        let asked = (0..batch).map(|_| Call::Schedule(ask()));
        let calls = ended.chain(asked).map(|call| exchange_request::Call { call: Some(call) }).collect();
        self.calls.send(proto::ExchangeRequest { calls }).await.context("the host ended the stream")?;
        let answers = self.answers.message().await?.context("the host ended the stream")?.answers;
        for answer in answers {
            match answer.answer {
                Some(Answer::Scheduled(scheduled)) => self.open.push(scheduled.request_id),
                Some(Answer::Completed(_)) => {}
                other => bail!("the host refused a call: {other:?}"),
            }
        }
        Ok(())
    }
}

struct Measured {
    waits: Histogram<u64>,
    cpu: Duration,
}

impl Measured {
    fn us(&self, batch: usize) -> f64 {
        self.cpu.as_secs_f64() * 1e6 / (self.waits.len() as usize * batch) as f64
    }

    fn row(&self, name: &str, batch: usize) -> Row {
        let quantile = |at| Some(self.waits.value_at_quantile(at) as f64 / 1e3);
        Row { p50: quantile(0.5), p99: quantile(0.99), ..Row::new(name, self.us(batch), "us") }
    }
}

/// Times calls after a tenth as many to warm up.
fn measure(calls: usize, mut call: impl FnMut() -> Result<()>) -> Result<Measured> {
    let mut waits = Histogram::new_with_bounds(1, 60_000_000_000, 3).expect("bounds are valid");
    for _ in 0..calls / 10 {
        call()?;
    }
    let before = others_cpu();
    for _ in 0..calls.max(1) {
        let start = Instant::now();
        call()?;
        waits.saturating_record(start.elapsed().as_nanos() as u64);
    }
    Ok(Measured { waits, cpu: others_cpu().saturating_sub(before) })
}

/// Processor time of all threads but this one.
fn others_cpu() -> Duration {
    let all = clock_gettime(ClockId::ProcessCPUTime);
    let all = Duration::new(all.tv_sec.unsigned_abs(), all.tv_nsec as u32);
    all.saturating_sub(thread_cpu_time())
}

/// A server that has its answers ready.
struct Echo {
    addr: ControlAddr,
    _runtime: tokio::runtime::Runtime,
}

impl Echo {
    fn start(socket: &Path) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        let _context = runtime.enter();
        let incoming = UnixListenerStream::new(tokio::net::UnixListener::bind(socket)?);
        let server = tonic::transport::Server::builder().add_service(Answers);
        runtime.spawn(server.serve_with_incoming(incoming));
        Ok(Self { addr: ControlAddr::Unix(socket.into()), _runtime: runtime })
    }
}

#[derive(Clone)]
struct Answers;

impl NamedService for Answers {
    const NAME: &'static str = SERVICE_NAME;
}

impl Service<http::Request<Body>> for Answers {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        Box::pin(async move {
            let schedule = request.uri().path().ends_with("/Schedule");
            Ok(if schedule {
                Grpc::new(ProstCodec::default()).unary(Answers, request).await
            } else {
                Grpc::new(ProstCodec::default()).unary(Done, request).await
            })
        })
    }
}

impl UnaryService<proto::ScheduleRequest> for Answers {
    type Response = proto::ScheduleResponse;
    type Future = Ready<Result<Response<proto::ScheduleResponse>, Status>>;

    fn call(&mut self, _: Request<proto::ScheduleRequest>) -> Self::Future {
        let placement = proto::Placement { prefill: NAME.into(), decode: NAME.into(), ..Default::default() };
        let decision = Some(proto::schedule_response::Decision::Placement(placement));
        let policy = NAME.into();
        ready(Ok(Response::new(proto::ScheduleResponse {
            request_id: 1,
            decision,
            policy,
            ..Default::default()
        })))
    }
}

struct Done;

impl UnaryService<proto::CompleteRequest> for Done {
    type Response = proto::CompleteResponse;
    type Future = Ready<Result<Response<proto::CompleteResponse>, Status>>;

    fn call(&mut self, _: Request<proto::CompleteRequest>) -> Self::Future {
        ready(Ok(Response::new(proto::CompleteResponse {})))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_measured() {
        let rows = rows(Size::SMOKE).unwrap();
        assert_eq!(rows.len(), 3);
        assert!(rows.iter().all(|row| row.value > 0.0 && row.ratio.is_some()), "{rows:?}");
    }
}
