//! Against registries that lie. A real one is in `tests/serve/registry.rs`.

use super::super::tests::{key, package};
use super::*;
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::response::{IntoResponse, Response as Answer};
use std::collections::HashMap;
use std::sync::Arc;

/// Answers of a registry, by path.
type Pages = HashMap<String, Vec<u8>>;

/// What an honest registry would serve.
fn pages(package: &Package) -> Pages {
    let mut pages = Pages::new();
    let (manifest, digest) = (package.manifest.clone(), package.manifest_digest());
    pages.insert("manifests/1".into(), manifest.clone());
    pages.insert(format!("manifests/sha256:{digest}"), manifest);
    let (config, signed) = cosign::image(None, &package.signatures);
    let mut blobs = vec![&package.component, &package.config, &config];
    blobs.extend(package.signatures.iter().map(|signature| &signature.payload));
    for blob in blobs {
        pages.insert(format!("blobs/sha256:{}", Digest::of(blob)), blob.clone());
    }
    pages.insert(format!("manifests/{}", cosign::tag(digest)), signed);
    pages
}

/// Serves what `answer` makes of each request; returns a reference to its tag `1`.
async fn serve<F>(answer: impl Fn(Request) -> F + Clone + Send + Sync + 'static) -> Reference
where
    F: Future<Output = Answer> + Send + 'static,
{
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(async { axum::serve(listener, Router::new().fallback(answer)).await });
    format!("{addr}/acme/lru:1").parse().unwrap()
}

async fn serve_pages(pages: Pages) -> Reference {
    let pages = Arc::new(pages);
    serve(move |request| {
        let found = pages.get(request.uri().path().trim_start_matches("/v2/acme/lru/")).cloned();
        async { found.map_or_else(|| StatusCode::NOT_FOUND.into_response(), IntoResponse::into_response) }
    })
    .await
}

async fn pull(from: &Reference) -> Result<Package, Error> {
    Registry::of(from, None, false)?.pull(&from.version).await
}

async fn refused(pages: Pages, part: &str) {
    let reason = pull(&serve_pages(pages).await).await.unwrap_err().to_string();
    assert!(reason.contains(part), "{reason}");
}

#[tokio::test]
async fn what_an_honest_registry_has_comes_whole() {
    let signed = package("lru", &[&key(), &key()]);
    let from = serve_pages(pages(&signed)).await;
    assert_eq!(pull(&from).await.unwrap(), signed);
    let by_digest = from.at(Version::Digest(signed.manifest_digest()));
    assert_eq!(pull(&by_digest).await.unwrap(), signed);
    let mut unsigned = pages(&signed);
    unsigned.remove(&format!("manifests/{}", cosign::tag(signed.manifest_digest())));
    assert!(pull(&serve_pages(unsigned).await).await.unwrap().signatures.is_empty());
}

#[tokio::test]
async fn changed_parts_are_refused() {
    let (lru, fifo) = (package("lru", &[&key()]), package("fifo", &[]));
    let (good, digest) = (pages(&lru), lru.manifest_digest());
    let component = format!("blobs/sha256:{}", lru.component_digest());
    let mut bent = lru.component.clone();
    bent[1000] ^= 1;
    for (path, bytes) in [(component.clone(), bent), (component.clone(), lru.component[..500].to_vec())] {
        let mut pages = good.clone();
        pages.insert(path, bytes);
        refused(pages, "the component was changed").await;
    }
    let mut longer = good.clone();
    longer.insert(component.clone(), [&lru.component[..], b"more"].concat());
    refused(longer, "at most").await;
    let mut missing = good.clone();
    missing.remove(&component);
    refused(missing, "does not have the component").await;
    // The tag moved: what came is whole, but not what was asked for by its digest.
    let mut moved = good.clone();
    moved.extend(pages(&fifo));
    moved.insert(format!("manifests/sha256:{digest}"), fifo.manifest.clone());
    let from = serve_pages(moved).await;
    assert_eq!(pull(&from).await.unwrap().about.name, "fifo");
    let reason = pull(&from.at(Version::Digest(digest))).await.unwrap_err();
    assert!(matches!(reason, Error::Changed { what: "the manifest", wanted, .. } if wanted == digest));
    let payload = format!("blobs/sha256:{}", Digest::of(&lru.signatures[0].payload));
    let mut forged = good.clone();
    forged.insert(payload, b"{}".to_vec());
    refused(forged, "a signature was changed").await;
    let mut garbage = good;
    garbage.insert("manifests/1".into(), b"<html>".to_vec());
    refused(garbage, "the manifest is not what it should be").await;
}

#[tokio::test]
async fn nothing_is_read_without_end() {
    let endless = |status: StatusCode| {
        move |_: Request| async move {
            let piece = Ok::<_, std::io::Error>(Bytes::from_static(&[b'x'; 64 << 10]));
            let body = tokio_stream::StreamExt::map(tokio_stream::iter(0..), move |_: u64| {
                piece.as_ref().map(Bytes::clone).map_err(|_| std::io::Error::other("none"))
            });
            (status, Body::from_stream(body)).into_response()
        }
    };
    let from = serve(endless(StatusCode::OK)).await;
    assert!(matches!(pull(&from).await, Err(Error::TooLarge { what: "the manifest", .. })));
    let from = serve(endless(StatusCode::BAD_GATEWAY)).await;
    assert!(matches!(pull(&from).await, Err(Error::Answer { status: 502, .. })));
    // A manifest that announces more than is taken is not followed.
    let lru = package("lru", &[]);
    let mut pages = pages(&lru);
    let text = String::from_utf8(lru.manifest.clone()).unwrap();
    let size = format!("\"size\":{}", lru.component.len());
    pages.insert("manifests/1".into(), text.replace(&size, "\"size\":99999999999").into_bytes());
    refused(pages, "the component has 99999999999 bytes").await;
}

#[tokio::test]
async fn a_login_is_shown_where_it_belongs() {
    let lru = package("lru", &[]);
    let served = Arc::new(pages(&lru));
    let from = serve(move |request| {
        let served = Arc::clone(&served);
        let header =
            |name: &str| request.headers().get(name).and_then(|v| v.to_str().ok()).unwrap_or("").to_owned();
        let (path, authorization) = (request.uri().clone(), header("authorization"));
        async move {
            if path.path() == "/token" {
                let asked = path.query() == Some("service=it&scope=repository%3Aacme%2Flru%3Apull");
                let known = asked && authorization == "Basic bWU6c2VjcmV0";
                return if known {
                    r#"{"token":"t0"}"#.into_response()
                } else {
                    StatusCode::FORBIDDEN.into_response()
                };
            }
            if authorization != "Bearer t0" {
                let wanted = "Bearer realm=\"/token\",service=\"it\",scope=\"repository:acme/lru:pull\"";
                return (StatusCode::UNAUTHORIZED, [("www-authenticate", wanted)]).into_response();
            }
            let found = served.get(path.path().trim_start_matches("/v2/acme/lru/")).cloned();
            found.map_or_else(|| StatusCode::NOT_FOUND.into_response(), IntoResponse::into_response)
        }
    })
    .await;
    let me = |password: &str| Some(Credential { username: "me".into(), password: password.into() });
    let with = async |credential| Registry::of(&from, credential, false).unwrap().pull(&from.version).await;
    assert_eq!(with(me("secret")).await.unwrap(), lru);
    for credential in [me("wrong"), None] {
        let reason = with(credential).await.unwrap_err().to_string();
        assert!(reason.contains("docker login"), "{reason}");
    }
}

#[tokio::test]
async fn a_registry_that_is_not_there_says_so() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let from: Reference = format!("{}/acme/lru:1", listener.local_addr().unwrap()).parse().unwrap();
    drop(listener);
    let reason = pull(&from).await.unwrap_err().to_string();
    assert!(reason.contains("cannot reach the registry 127.0.0.1"), "{reason}");
}
