FROM atoll-corpus/busybox:1
COPY . /all/
